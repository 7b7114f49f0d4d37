"""A process of a real job dies: the others end too, and never with exit code 2,
after which launchers give up.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.processes import STORES_NO_PROGRAMS

pytestmark = pytest.mark.slow


def rows(workdir: Path) -> int:
    metrics = workdir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def is_saving(workdir: Path) -> bool:
    steps = [
        path
        for path in (workdir / "checkpoints").glob("*/")
        if not (path / "manifest.json").exists()
    ]
    return bool(steps) and any((workdir / "checkpoints").glob("*/manifest.json"))


def is_evaluating(workdir: Path) -> bool:
    """Return True after the row of step 2 and before that of its evaluation, which
    begins by compiling.
    """
    return rows(workdir) == 1


# When a process dies, and the files of the workdir that show that this moment has come.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "start": lambda workdir: (workdir / "lock.json").exists(),
    "evaluation": is_evaluating,
    "training": lambda workdir: rows(workdir) > 4,
    "save": is_saving,
}


class Pair:
    """Two processes that train together."""

    def __init__(self, recipe: Path, workdir: Path, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.workdir = workdir
        command = [
            sys.executable,
            "scripts/train.py",
            f"--config={recipe}",
            f"--workdir={workdir}",
        ]
        command += [
            f"--coordinator_address={address}",
            "--num_processes=2",
            "--config.checkpoint.keep_best=0",
        ]
        command += [
            "--config.training.steps=100000",
            "--config.training.evaluate_every=100000",
            *options,
        ]
        logs = [workdir.with_suffix(f".{i}.log") for i in range(2)]
        environment = os.environ | STORES_NO_PROGRAMS | {"JAX_PLATFORMS": "cpu"}
        self.processes = []
        for i, path in enumerate(logs):
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [*command, f"--process_id={i}"],
                    cwd=ROOT,
                    stderr=log,
                    env=environment,
                )
            self.processes.append(process)
        self.logs = logs

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for(self, moment: str) -> None:
        while not MOMENTS[moment](self.workdir):
            for process, log in zip(self.processes, self.logs, strict=True):
                assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.001)

    def codes(self) -> tuple[int, int]:
        first, second = (process.wait(timeout=120) for process in self.processes)
        return first, second


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("moment", "number"),
    [(moment, signal.SIGKILL) for moment in MOMENTS]
    + [("training", signal.SIGSEGV), ("training", signal.SIGABRT)],
)
def test_the_survivor_of_a_dead_process_is_restarted(
    recipe, tmp_path, moment, number, victim
):
    with Pair(
        recipe,
        tmp_path / "run",
        *(("--config.training.evaluate_every=2",) * (moment == "evaluation")),
    ) as pair:
        pair.wait_for(moment)
        pair.processes[victim].send_signal(number)
        codes = pair.codes()
    print(f"{moment}: process {victim} dies of {number.name}: {codes}")
    assert codes[victim] == -number
    assert codes[1 - victim] not in (0, 2, 75), pair.logs[1 - victim].read_text()[
        -3000:
    ]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
)
def test_a_signal_to_one_process_stops_both_after_the_same_step(
    recipe, tmp_path, number, victim
):
    # a shell's background jobs ignore SIGINT, and nohup's SIGHUP; children inherit it
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    with Pair(recipe, tmp_path / "run") as pair:
        pair.wait_for("training")
        pair.processes[victim].send_signal(number)
        assert pair.codes() == (75, 75), pair.logs[victim].read_text()[-3000:]
    assert "which is saved" in pair.logs[0].read_text()
