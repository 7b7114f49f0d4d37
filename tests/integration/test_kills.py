"""Runs killed with kill -9 at random moments lose nothing and end bitwise like an
undisturbed run.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.corpus import real_data
from helpers.modalities import small_recipe
from helpers.processes import STORES_NO_PROGRAMS

pytestmark = pytest.mark.slow
EVERY = 10  # steps between checkpoints of the runs in a single process

ENVIRONMENT = os.environ | STORES_NO_PROGRAMS


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, f"scripts/{name}.py", *arguments]


def parameters(workdir: Path) -> str:
    scores = ("--split=val", "--config.evaluation.checkpoint=latest")
    done = subprocess.run(
        command("evaluate", f"--workdir={workdir}", *scores),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)["parameters_sha256"]


def last_step(workdir: Path) -> int:
    """Return the newest step that is completely saved."""
    manifests = (workdir / "checkpoints").glob("*/manifest.json")
    return max((int(path.parent.name) for path in manifests), default=0)


def last_row(workdir: Path) -> int:
    """Return the newest step in metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    steps = (
        re.findall(r'^{"step": (\d+), .*}$', path.read_text(), re.MULTILINE)
        if path.exists()
        else []
    )
    return max(map(int, steps), default=0)


def is_saving(workdir: Path) -> bool:
    """Return True if a step beyond the newest complete one is being written.

    Older steps without a manifest do not count: they are being removed.
    """
    begun = (
        int(path.name.partition(".")[0])
        for path in (workdir / "checkpoints").glob("*/")
    )
    return max(begun, default=0) > last_step(workdir)


def training(config: str, steps: int, *options: str) -> list[str]:
    """Return a command, without its workdir, that saves every EVERY steps and
    evaluates at the end.
    """
    options += f"--config.training.steps={steps}", f"--config.checkpoint.every={EVERY}"
    options += (
        f"--config.training.evaluate_every={steps}",
        "--config.checkpoint.keep_best=0",
    )
    return command("train", f"--config={config}", *options)


def finish(run: list[str], workdir: Path) -> None:
    subprocess.run(
        [*run, f"--workdir={workdir}"], cwd=ROOT, stderr=subprocess.DEVNULL, check=True
    )


def kill(run: list[str], workdir: Path, moment: int, in_save: bool = False) -> None:
    """Start or continue a run and kill it after step `moment`, at a random time or
    in the middle of a save.
    """
    before = last_step(workdir)
    process = subprocess.Popen(
        [*run, f"--workdir={workdir}"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    # This attempt has saved at least one step, so the unfinished steps of earlier
    # attempts have been removed.
    while last_step(workdir) < max(moment, before + EVERY) or (
        in_save and not is_saving(workdir)
    ):
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.0005)
    if not in_save:
        time.sleep(random.random() / 10)
    process.kill()
    process.wait()
    assert is_saving(workdir) or not in_save, (
        "the save ended before the kill: run the test again"
    )
    print(f"killed after step {last_step(workdir)}, in a save: {is_saving(workdir)}")


def test_a_run_killed_twenty_times(recipe, tmp_path):
    """Every fourth kill is in the middle of a save."""
    steps = 800
    run = training(str(recipe), steps)
    finish(run, tmp_path / "whole")
    for number, moment in enumerate(
        sorted(random.sample(range(2 * EVERY, steps - 20 * EVERY), 20))
    ):
        kill(run, tmp_path / "killed", moment, in_save=number % 4 == 3)
    finish(run, tmp_path / "killed")
    assert parameters(tmp_path / "killed") == parameters(tmp_path / "whole")


SETTINGS = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({settings!r})
"""


@pytest.mark.parametrize(
    ("name", "arg"),
    [("captions", ""), ("captions", "image=photographs"), ("speech", "model=joint")],
)
def test_pictures_and_speech_killed_three_times(name, arg, tmp_path):
    config = small_recipe(name, arg, tmp_path / "data")
    path = tmp_path / f"{name}.py"
    path.write_text(SETTINGS.format(settings=config.to_dict()))
    run = training(str(path), 200)
    finish(run, tmp_path / "whole")
    for number, moment in enumerate((20, 70, 120)):
        kill(run, tmp_path / "killed", moment, in_save=number == 1)
    finish(run, tmp_path / "killed")
    assert parameters(tmp_path / "killed") == parameters(tmp_path / "whole")


BERT = """
from transformer_jax.config import defaults, shrink

def get_config(task):
    config = defaults(task)
    shrink(config)
    config.data.directory = "DIRECTORY"
    config.data.tokenizer = "bert"
    config.training.log_every = 50
    if task == "classification":
        config.data.labels = ("even", "odd")
    return config
"""


def test_fine_tuning_killed_three_times(recipe, tmp_path):
    """The first kill is before the first checkpoint.

    After the second, the run that it started from is removed.
    """
    bert, source, workdir = (
        tmp_path / "bert.py",
        tmp_path / "source",
        tmp_path / "killed",
    )
    bert.write_text(BERT.replace("DIRECTORY", str(recipe.parent / "corpus")))
    finish(training(f"{bert}:bert_pretraining", 20), source)
    run = training(f"{bert}:classification", 300, f"--config.init_from={source}")
    finish(run, tmp_path / "whole")

    process = subprocess.Popen(
        [*run, f"--workdir={workdir}"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    while not (workdir / "tokenizer.json").exists():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert last_step(workdir) == 0

    kill(run, workdir, random.randrange(20, 100))
    shutil.rmtree(source)
    kill(run, workdir, random.randrange(120, 200))
    finish(run, workdir)
    assert parameters(workdir) == parameters(tmp_path / "whole")


@pytest.fixture(scope="module")
def captions(tmp_path_factory) -> Path:
    """Multi30k with a validation split that is short enough to be translated
    quickly.
    """
    folder, real = tmp_path_factory.mktemp("captions"), real_data("multi30k") / "tok"
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text(
            (real / f"train.{language}").read_text()
        )
        lines = (real / f"val.{language}").read_text().splitlines()[:20]
        (folder / f"val.{language}").write_text("\n".join(lines) + "\n")
    return folder


class Watched:
    """A job under its supervisor, and its log.

    On exit, all of its processes are stopped.
    """

    def __init__(self, count: int, workdir: Path, flags: list[str]):
        self.workdir, self._said = workdir, workdir.with_suffix(".log")
        with self._said.open("wb") as log:
            run = command(
                "launch/supervise", str(count), f"--workdir={workdir}", *flags
            )
            self.process = subprocess.Popen(
                run, cwd=ROOT, stderr=log, env=ENVIRONMENT | {"PAUSE": "0.1"}
            )

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=100)

    def attempts(self) -> list[list[int]]:
        """Return the steps that each attempt has logged so far: its first step, and
        some of the later ones.
        """
        attempts = self._said.read_text().split("restarting all processes")
        return [
            [int(n) for n in re.findall(r"^step (\d+)/\d+  loss", said, re.MULTILINE)]
            for said in attempts
        ]

    def wait(self, what) -> None:
        while not what():
            assert self.process.poll() is None, self._said.read_text()[-3000:]
            time.sleep(0.01)

    def kill(self, process_id: int) -> None:
        pattern = f"process_id={process_id} --workdir={self.workdir} "
        found = subprocess.run(
            ["pgrep", "-f", pattern], capture_output=True, text=True, check=True
        ).stdout.split()
        os.kill(int(found[0]), signal.SIGKILL)

    def end(self) -> None:
        """Wait for the job, which must end well. A job that hangs fails."""
        assert self.process.wait(timeout=3600) == 0, self._said.read_text()[-3000:]


@pytest.mark.parametrize("count", [2, 4])
def test_a_job_of_which_one_process_is_killed_ten_times(count, captions, tmp_path):
    """Kill the first process, which is the coordinator, at least twice.

    Print the time that each death costs.
    """
    kills, steps = 10, 500
    sizes = {"d_model": 32, "d_ff": 64, "head_dim": 8, "value_dim": 8, "unroll": 1}
    sizes |= {
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "source_vocab_size": 2000,
        "target_vocab_size": 2000,
    }
    flags = [
        f"--config={ROOT}/configs/multi30k.py:en-de",
        f"--config.data.directory={captions}",
    ]
    flags += [f"--config.model.{name}={size}" for name, size in sizes.items()]
    flags += [
        "--config.data.batch_tokens=1024",
        "--config.data.max_buckets=1",
        "--config.data.max_length=64",
    ]
    flags += [
        f"--config.training.steps={steps}",
        "--config.training.log_every=1",
        "--config.checkpoint.every=10",
    ]
    flags += [
        f"--config.training.evaluate_every={steps}",
        "--config.checkpoint.keep_best=0",
    ]

    with Watched(count, tmp_path / "undisturbed", flags) as undisturbed:
        undisturbed.end()
    victims = random.sample(
        [0, 0, *(random.randrange(count) for _ in range(kills - 2))], kills
    )
    with Watched(count, tmp_path / "killed", flags) as job:
        for moment, victim in zip(
            sorted(random.sample(range(20, 380), kills)), victims, strict=True
        ):
            # Kill at a random moment after this step. Every attempt saves at least one
            # newer checkpoint.
            since = last_step(job.workdir)

            def reached(moment=moment, since=since) -> bool:
                return (
                    bool(job.attempts()[-1])
                    and last_row(job.workdir) >= moment
                    and last_step(job.workdir) > since
                )

            job.wait(reached)
            time.sleep(random.random() / 5)
            job.kill(victim)
            death, before, row = time.monotonic(), job.attempts(), last_row(job.workdir)
            job.wait(
                lambda before=before: (
                    len(job.attempts()) > len(before) and job.attempts()[-1]
                )
            )
            cost = time.monotonic() - death
            print(
                f"{count} processes: "
                f"{victim} killed after {row}, {job.attempts()[-1][0]} in {cost:.1f} s"
            )
        job.end()
        assert len(job.attempts()) == 1 + kills
    assert parameters(job.workdir) == parameters(undisturbed.workdir)
    rows = [
        json.loads(line)
        for line in (job.workdir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if row["split"] == "train"] == list(
        range(1, steps + 1)
    )
