r"""Run N processes of scripts/train.py on this host, and restart them when one dies.

    python scripts/launch/supervise.py N --config=FILE --workdir=DIR \
        [other flags of train.py]

When one process dies, the others cannot continue without it. All are then restarted
from the newest checkpoint, after a pause that doubles from PAUSE (1 s) to 60 s. After
TRIES (10) restarts in a row without a newer checkpoint, the script gives up. PAUSE and
TRIES are environment variables. On SIGTERM, SIGINT, SIGHUP or SIGUSR1, the processes
save and stop.

Exit codes: 0 if the run finished; 75 if it stopped with everything saved and the same
command continues it; 2 for an error that a restart cannot fix; otherwise that of the
process that died.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from etils import epath

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
FINISHED = 0
ERROR = 2
RUN_AGAIN = 75
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1
POLL = 0.05  # seconds between checks of the processes
# seconds for the other processes to report, after one has ended with an error
LAST_WORDS = 5
GRACE = 600  # seconds to save a checkpoint, after a request to stop


def _stop_with_parent() -> None:
    """Set up a new process, before it runs train.py, to get its signals from the
    supervisor.

    In a session of its own it does not receive Ctrl-C from the terminal; the supervisor
    passes it on. If the supervisor is killed, Linux sends the process SIGTERM, so that
    it saves and stops.
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Job:
    """The N processes between two restarts."""

    def __init__(self, count: int, arguments: Sequence[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        common = [
            sys.executable,
            str(TRAIN),
            f"--coordinator_address={address}",
            f"--num_processes={count}",
        ]
        commands = [[*common, f"--process_id={i}", *arguments] for i in range(count)]
        self._processes = [
            subprocess.Popen(command, preexec_fn=_stop_with_parent)
            for command in commands
        ]

    def poll(self) -> int | None:
        """Return the exit code of a process that failed, 0 if all have finished,
        None while they run.
        """
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        # the cause of the other failures: a process ends with it only because of its
        # own input
        if ERROR in failed:
            return ERROR
        return min(failed) if failed else None if None in codes else FINISHED

    def stopped(self) -> bool:
        """Return True if a process ended because of the request to stop.

        During training, all save the same step before one ends with RUN_AGAIN. Before
        that, nothing needs to be saved: one may die of the signal, or because another
        one has ended.
        """
        return any(
            process.poll() in (RUN_AGAIN, -signal.SIGTERM)
            for process in self._processes
        )

    def tell(self, number: int) -> None:
        """Send a signal to all processes."""
        for process in self._processes:
            process.send_signal(number)

    def end(self, patience: float = 0) -> int | None:
        """Wait up to `patience` seconds for the processes to end, then kill them all,
        and their child processes.

        Return what `poll` says before that. It can differ from an earlier answer: a
        process may fail because of another one, and be seen first.
        """
        until = time.monotonic() + patience
        while time.monotonic() < until and any(
            process.poll() is None for process in self._processes
        ):
            time.sleep(POLL)
        code = self.poll()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return code


def newest_checkpoint(workdir: epath.Path) -> int:
    """Return the newest step with a complete checkpoint, or -1 if there is none."""
    names = [path.parent.name for path in workdir.glob("checkpoints/*/manifest.json")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def supervise(
    count: int, arguments: Sequence[str], workdir: epath.Path, tries: int, pause: float
) -> int:
    """Run the job until it finishes, fails or is stopped, and return the exit code."""
    stopping: list[int] = []
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # e.g. by nohup
            signal.signal(number, lambda number, _: stopping.append(number))
    failures = 0
    before = newest_checkpoint(workdir)
    while True:
        job = Job(count, arguments)
        told: float | None = None
        while (code := job.poll()) is None and (
            told is None or time.monotonic() < told + GRACE
        ):
            if stopping and told is None:
                told = time.monotonic()
                job.tell(signal.SIGTERM)
            time.sleep(POLL)
        code = job.end({RUN_AGAIN: GRACE, -signal.SIGKILL: 0}.get(code, LAST_WORDS))
        if code in (FINISHED, ERROR):
            return code
        if stopping:
            return RUN_AGAIN if job.stopped() else _exit_code(code)
        after = newest_checkpoint(workdir)
        failures = 1 if after > before else failures + 1
        before = after
        if failures > tries:
            print(
                f"giving up after {tries} restarts without a newer checkpoint",
                file=sys.stderr,
            )
            return _exit_code(code)
        wait = min(pause * 2 ** (failures - 1), 60)
        message = (
            f"exit code {code}: "
            f"restarting all processes in {wait:g} s ({failures} of {tries})"
        )
        print(message, file=sys.stderr, flush=True)
        until = time.monotonic() + wait
        while time.monotonic() < until and not stopping:
            time.sleep(POLL)
        if stopping:
            return RUN_AGAIN


def _exit_code(code: int | None) -> int:
    """Return the exit code that a shell would report: 128 + signal number for a
    killed process, 1 for None.
    """
    return 1 if code is None else code if code >= 0 else 128 - code


def setting(name: str, default: str, pattern: str) -> str:
    """Return the value of an environment variable.

    Raises ValueError unless it is a number that matches `pattern`.
    """
    value = os.environ.get(name) or default
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ValueError(
            f"{name}={value}: must be a number that is not negative, e.g. {default}"
        )
    return value


def main() -> int:
    count, *arguments = sys.argv[1:] or [""]
    workdirs = [
        argument.partition("=")[2]
        for argument in arguments
        if argument.startswith("--workdir=")
    ]
    if not count.isdigit() or int(count) < 1 or not workdirs:
        print(
            f"usage: {sys.argv[0]} N --config=FILE --workdir=DIR [--config.a.b=v ...]",
            file=sys.stderr,
        )
        return ERROR
    try:
        tries = int(setting("TRIES", "10", r"\d+"))
        pause = float(setting("PAUSE", "1", r"\d+\.?\d*|\.\d+"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR
    return supervise(
        int(count), arguments, epath.Path(workdirs[-1]).expanduser(), tries, pause
    )


if __name__ == "__main__":
    sys.exit(main())
