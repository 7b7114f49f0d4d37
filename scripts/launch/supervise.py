"""N processes of scripts/train.py on this host: python scripts/launch/supervise.py N --workdir=DIR [its other flags].

When one dies the others cannot go on: all are started again, after a pause that doubles from PAUSE (1 s) to 60 s, and
go on from the newest checkpoint. After TRIES (10) restarts in a row without a newer one it gives up; both are
environment variables. SIGTERM and SIGINT reach all, which save. Exit codes: 0 finished; 75 stopped with everything
saved, run me again; 2 an error that no restart mends; else that of the process that died.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
FINISHED, ERROR, RUN_AGAIN = 0, 2, 75
PR_SET_PDEATHSIG = 1
POLL = 0.05  # seconds between looks at the processes
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
        # Where an error is the reason, the others' deaths are what follows from it.
        return ERROR if ERROR in failed else failed[0] if failed else None if None in codes else FINISHED

    def tell(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def end(self, patience: float = 0) -> None:
        """Waits for those that are still saving, then kills what is left."""
        until = time.monotonic() + patience
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(POLL)
        self.tell(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def newest_checkpoint(workdir: Path) -> int:
    """The newest step that was completely saved; -1 if there is none."""
    return max((int(path.parent.name) for path in workdir.glob("checkpoints/*/manifest.json")), default=-1)


def supervise(count: int, arguments: Sequence[str], workdir: Path, tries: int, pause: float) -> int:
    """Runs the job to its end; returns the exit code."""
    stopping: list[int] = []
    job: Job | None = None

    def stop(number: int, _: Any) -> None:
        stopping.append(number)
        if job is not None:
            job.tell(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    failures, before = 0, newest_checkpoint(workdir)
    while True:
        job = Job(count, arguments)
        told: float | None = None
        while (code := job.poll()) is None and (told is None or time.monotonic() < told + GRACE):
            if stopping and told is None:
                told = time.monotonic()
            time.sleep(POLL)
        job.end(GRACE if code == RUN_AGAIN else 0)
        if code in (FINISHED, ERROR):
            return code
        if stopping:
            return RUN_AGAIN
        after = newest_checkpoint(workdir)
        failures, before = 1 if after > before else failures + 1, after
        if failures > tries:
            print(f"given up after {tries} restarts without a newer checkpoint", file=sys.stderr)
            return 1 if code is None else code if code > 0 else 128 - code
        wait = min(pause * 2 ** (failures - 1), 60)
        print(f"exit code {code}: all start again in {wait:g} s ({failures} of {tries})", file=sys.stderr, flush=True)
        until = time.monotonic() + wait
        while time.monotonic() < until and not stopping:
            time.sleep(POLL)
        if stopping:
            return RUN_AGAIN


def main() -> int:
    count, *arguments = sys.argv[1:] or [""]
    workdirs = [argument.partition("=")[2] for argument in arguments if argument.startswith("--workdir=")]
    if not count.isdigit() or int(count) < 1 or not workdirs:
        print(f"usage: {sys.argv[0]} N --config=FILE --workdir=DIR [--config.a.b=v ...]", file=sys.stderr)
        return ERROR
    tries, pause = int(os.environ.get("TRIES", "10")), float(os.environ.get("PAUSE", "1"))
    return supervise(int(count), arguments, Path(workdirs[-1]), tries, pause)


if __name__ == "__main__":
    sys.exit(main())
