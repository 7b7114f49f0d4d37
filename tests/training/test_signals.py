"""Signals end a script within two seconds, whatever it is doing, and its workers
with it.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.forked import Running, begun
from transformer_jax.training import signals

IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

STOPS = [
    signal.SIGTERM,
    signal.SIGINT,
    pytest.param(
        signal.SIGHUP,
        marks=pytest.mark.skipif(IGNORED, reason="nohup: SIGHUP is ignored"),
    ),
    signal.SIGUSR1,
]

# Work in Python, in a library that does not return, in worker processes, and in a
# thread that a pool waits for.
WORK = {
    "python": "ready()\nwhile True: time.sleep(0.01)",
    "library": "ready()\nhashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "workers": (
        """
with workers(2) as submit:
    futures = [submit(time.sleep, 600) for _ in range(2)]
    while not all(future.running() for future in futures):
        time.sleep(0.01)
    ready()
    futures[0].result()
"""
    ),
    "threads": (
        """
with compiling_ahead() as submit:
    submit(Slow())
    ready()
    time.sleep(600)
"""
    ),
    "steps": (
        """
with StopRequest() as request:
    request.reached(1)
    ready()
    while True: time.sleep(0.01)
"""
    ),
}

BEFORE_TRAINING = [work for work in WORK if work != "steps"]

# One of several processes, after jax.distributed has installed its own handler.
WORK["distributed"] = """
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
processes.initialize(f"127.0.0.1:{port}", 1, 0)
ready()
while True: time.sleep(0.01)
"""

PROGRAM = """
import hashlib, signal, socket, sys, time
from pathlib import Path
from types import SimpleNamespace
from transformer_jax import command_line
from transformer_jax.data.workers import workers
from transformer_jax.training import processes
from transformer_jax.training.engine import compiling_ahead
from transformer_jax.training.signals import StopRequest

class Slow:
    def lower(self):
        return SimpleNamespace(compile=lambda: time.sleep(600))

def ready():
    Path(sys.argv[2]).touch()

def main():
    try:
        WORK
    finally:
        if sys.argv[1] != "library":
            print("cleaned up", file=sys.stderr)

if __name__ == "__main__":
    # a shell's background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line.run(main, [sys.argv[0]], distributed=False, resumable=RESUMABLE)
"""


def alive(pid: str) -> bool:
    """Return True unless the process has ended.

    Nobody may have asked for its exit code yet.
    """
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


@contextlib.contextmanager
def busy(folder: Path, work: str, resumable: bool = False) -> Iterator[Running]:
    """Start a script that does `work`, and wait until it does."""
    path = folder / f"{work}.py"
    body = WORK[work].strip().replace("\n", "\n        ")
    path.write_text(PROGRAM.replace("WORK", body).replace("RESUMABLE", str(resumable)))
    ready = folder / "ready"
    with begun(path, work, str(ready)) as running:
        until = time.monotonic() + 100
        while not ready.exists():
            assert time.monotonic() < until, (running.folder / "2").read_text()
            time.sleep(0.01)
        yield running


def ends_soon(running: Running, number: int) -> subprocess.CompletedProcess:
    start = time.monotonic()
    running.send(number)
    done = running.end(timeout=60)
    took = time.monotonic() - start
    # 2 s on a machine that has nothing else to do
    assert took < 5, f"ended after {took:.1f} s"
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


@pytest.mark.parametrize("number", STOPS)
def test_a_script_dies_of_the_signal(tmp_path, number):
    with busy(tmp_path, "python") as running:
        done = ends_soon(running, number)
    assert (done.returncode, done.stderr) == (-number, b"cleaned up\n")


def test_a_process_of_several_dies_of_it_too(tmp_path):
    with busy(tmp_path, "distributed") as running:
        done = ends_soon(running, signal.SIGTERM)
    assert done.returncode == -signal.SIGTERM
    assert b"cleaned up\n" in done.stderr


@pytest.mark.parametrize("work", BEFORE_TRAINING)
def test_a_training_run_that_has_nothing_to_save_ends_whatever_it_does(tmp_path, work):
    with busy(tmp_path, work, resumable=True) as running:
        done = ends_soon(running, signal.SIGTERM)
    said = (
        b"stopped by SIGTERM before the first step: run the same command again to"
        b" continue\n"
    )
    assert (done.returncode, done.stderr) == (
        75,
        b"cleaned up\n" * (work != "library") + said,
    )


def test_a_second_ctrl_c_during_training_ends_the_run_without_saving(tmp_path):
    with busy(tmp_path, "steps", resumable=True) as running:
        running.send(signal.SIGINT)
        until = time.monotonic() + 60
        while b"saving the current step" not in (running.folder / "2").read_bytes():
            assert time.monotonic() < until
            time.sleep(0.01)
        done = ends_soon(running, signal.SIGINT)
    assert done.returncode == -signal.SIGINT
    assert b"before the first step" not in done.stderr


def test_ctrl_c_reaches_the_workers_too_and_they_say_nothing(tmp_path):
    with busy(tmp_path, "workers") as running:
        children = subprocess.run(
            ["pgrep", "-P", str(running.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        pids = children.stdout.split()
        assert len(pids) >= 2
        subprocess.run(["kill", "-INT", *pids], check=True)
        time.sleep(0.5)
        done = ends_soon(running, signal.SIGINT)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"cleaned up\n")
    assert not any(map(alive, pids))


def test_workers_end_when_their_parent_is_killed(tmp_path):
    with busy(tmp_path, "workers") as running:
        command = ["pgrep", "-P", str(running.pid)]
        pids = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()
        running.send(signal.SIGKILL)
        assert running.end().returncode == -signal.SIGKILL
    until = time.monotonic() + 60  # a worker that has just been started still imports
    while any(map(alive, pids)):
        assert time.monotonic() < until, "a worker lives on"
        time.sleep(0.01)


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise KeyboardInterrupt.

    Background jobs of a shell ignore it otherwise.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_background_job_goes_on_ignoring_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.reached(1)


@pytest.mark.usefixtures("interruptible")
def test_the_second_ctrl_c_ends_at_once():
    with signals.StopRequest() as stop:
        assert not stop.reached(1)
        signal.raise_signal(signal.SIGINT)
        assert stop.reached(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
