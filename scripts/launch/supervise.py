"""N processes of scripts/train.py on this host: python scripts/launch/supervise.py N --workdir=DIR [its other flags].

When one dies the others cannot go on: all are started again, after a pause that doubles from PAUSE (1 s) to 60 s, and
go on from the newest checkpoint. After TRIES (10) restarts in a row without a newer one it gives up; both are
environment variables. SIGTERM and SIGINT reach all, which save. Exit codes: 0 finished; 75 stopped with everything
saved, run me again; 2 an error that no restart mends; else that of the process that died.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from etils import epath

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
FINISHED, ERROR, RUN_AGAIN = 0, 2, 75
PR_SET_PDEATHSIG = 1
POLL = 0.05  # seconds between looks at the processes
LAST_WORDS = 5  # seconds that the others of a process with an error have for theirs
GRACE = 600  # seconds that processes which were told to stop have to save


def _stop_with_parent() -> None:
    """Ctrl-C is the supervisor's to pass on; when that is killed, Linux tells its processes to save and stop."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Job:
    """The N processes of one attempt."""

    def __init__(self, count: int, arguments: Sequence[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        common = [sys.executable, str(TRAIN), f"--coordinator_address={address}", f"--num_processes={count}"]
        commands = [[*common, f"--process_id={i}", *arguments] for i in range(count)]
        self._processes = [subprocess.Popen(command, preexec_fn=_stop_with_parent) for command in commands]

    def poll(self) -> int | None:
        """The exit code of a process that failed, 0 when all have finished, None while they run."""
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        # Where an error is the reason, the others' deaths are what follows from it; not where one was killed.
        if ERROR in failed and -signal.SIGKILL not in failed:
            return ERROR
        return min(failed) if failed else None if None in codes else FINISHED

    def tell(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def end(self, patience: float = 0) -> None:
        """Waits for those that have something left to save or to say, then kills all, and what they started."""
        until = time.monotonic() + patience
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(POLL)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def newest_checkpoint(workdir: epath.Path) -> int:
    """The newest step that was completely saved; -1 if there is none."""
    names = [path.parent.name for path in workdir.glob("checkpoints/*/manifest.json")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def supervise(count: int, arguments: Sequence[str], workdir: epath.Path, tries: int, pause: float) -> int:
    """Runs the job to its end; returns the exit code."""
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopping.append(number))
    failures, before = 0, newest_checkpoint(workdir)
    while True:
        job = Job(count, arguments)
        told: float | None = None
        while (code := job.poll()) is None and (told is None or time.monotonic() < told + GRACE):
            if stopping and told is None:
                told = time.monotonic()
                job.tell(signal.SIGTERM)
            time.sleep(POLL)
        job.end({RUN_AGAIN: GRACE, ERROR: LAST_WORDS}.get(code, 0))
        if code in (FINISHED, ERROR):
            return code
        if stopping:  # a process that had not begun to train dies of the signal, and has nothing to save
            return RUN_AGAIN if code in (RUN_AGAIN, -signal.SIGTERM) else _exit_code(code)
        after = newest_checkpoint(workdir)
        failures, before = 1 if after > before else failures + 1, after
        if failures > tries:
            print(f"given up after {tries} restarts without a newer checkpoint", file=sys.stderr)
            return _exit_code(code)
        wait = min(pause * 2 ** (failures - 1), 60)
        print(f"exit code {code}: all start again in {wait:g} s ({failures} of {tries})", file=sys.stderr, flush=True)
        until = time.monotonic() + wait
        while time.monotonic() < until and not stopping:
            time.sleep(POLL)
        if stopping:
            return RUN_AGAIN


def _exit_code(code: int | None) -> int:
    """As a shell gives it: 128 + the number of the signal that ended a process; 1 where none ended."""
    return 1 if code is None else code if code >= 0 else 128 - code


def main() -> int:
    count, *arguments = sys.argv[1:] or [""]
    workdirs = [argument.partition("=")[2] for argument in arguments if argument.startswith("--workdir=")]
    if not count.isdigit() or int(count) < 1 or not workdirs:
        print(f"usage: {sys.argv[0]} N --config=FILE --workdir=DIR [--config.a.b=v ...]", file=sys.stderr)
        return ERROR
    tries, pause = int(os.environ.get("TRIES", "10")), float(os.environ.get("PAUSE", "1"))
    return supervise(int(count), arguments, epath.Path(workdirs[-1]).expanduser(), tries, pause)


if __name__ == "__main__":
    sys.exit(main())
