"""Invalid uses of train.py.

Each ends with one error message and exit code 2, and no file is lost.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.abusing import refused, unharmed
from helpers.forked import script
from helpers.processes import STORES_NO_PROGRAMS

KEYS = [
    (
        "training.steps=99999999999999999999999",
        "training.steps = 99999999999999999999999: must be less than 2³¹",
    ),
    ("training.steps=2147483648", "must be less than 2³¹"),
    (
        "decoding.beam_size=99999999999999999999999",
        "config.decoding.beam_size",
        "must be less than 2³¹",
    ),
    ("checkpoint.keep_latest=4294967296", "config.checkpoint.keep_latest = 4294967296"),
    (
        "model.d_ff=-99999999999999999999999",
        "config.model.d_ff",
        "must be less than 2³¹",
    ),
    ("training.steps=0", "config.training.steps = 0: must be at least 1"),
    ("training.steps=1.5", "config.training.steps = '1.5': must be of type int"),
    ("training.steps=", "config.training.steps = '': must be of type int"),
    ("training.seed=-1", "config.training.seed = -1: must be in [0, 2³¹)"),
    (
        "training.microbatches=7",
        "must divide data.rows_multiple = 8: set data.rows_multiple to a multiple of 7",
    ),
    (
        "data.batch_tokens=1",
        (
            "must have room for rows_multiple = 8 rows of max_length = 32: "
            "set it to 256 or more"
        ),
    ),
    ("data.max_length=1", "must be at least 2"),
    (
        "data.directory=",
        "must be the folder of the data: add --config.data.directory=DIR",
    ),
    ("data.source=web", "must be one of files, tfds"),
    ("model.dtype=int8", "must be one of float32, bfloat16"),
    ("mesh.data=0", "must be at least 1, or -1 for all remaining devices"),
    (
        "checkpoint.every=3",
        "must be a multiple of training.evaluate_every = 2 to keep the best",
    ),
    (
        "checkpoint.keep_latest=0",
        "must be at least 1, because training resumes from it",
    ),
    ("evaluation.checkpoint=ema", "training.ema_decay = 0.0 keeps no moving average"),
    (
        "evaluation.bleu_tokenizer=mecab",
        (
            "config.evaluation.bleu_tokenizer = 'mecab': "
            "must be one of 13a, intl, zh, ja-mecab, ko-mecab, char, none; use"
        ),
    ),
    ("task=gpt", "config.task = 'gpt' is not a task: choose one of"),
]


@pytest.mark.parametrize(
    ("key", "words"),
    [(key, words) for key, *words in KEYS],
    ids=[key for key, *_ in KEYS],
)
def test_a_value_that_cannot_be(recipe, trained, tmp_path, key, words):
    """Use a new workdir, which must not be created, and one that holds a run."""
    for workdir in (tmp_path / "new", trained):
        with unharmed(workdir):
            refused(
                script(
                    "train",
                    f"--config={recipe}",
                    f"--workdir={workdir}",
                    f"--config.{key}",
                ),
                *words,
            )


COMMANDS = [
    (["--workdir="], "--workdir= is empty: name a folder"),
    (["--workdir=~nobody-is-called-that/run"], "refers to the home of an unknown user"),
    (
        ["--workdir=http://host/run"],
        "--workdir=http://host/run cannot be written to",
        "or gs://BUCKET/",
    ),
    (["--workdir=gs://"], "--workdir=gs:// cannot be written to"),
    (
        ["--workdir=FOLDER/\udcff"],
        "contains unprintable characters: choose another name",
    ),
    (["--workdir=FOLDER/a\nb"], "a\\nb contains unprintable characters"),
    (
        ["--workdir=/dev/null"],
        "--workdir=/dev/null cannot be written",
        "choose another",
    ),
    (
        ["--workdir=FOLDER/file/run"],
        "FOLDER/file/run cannot be written",
        "Not a directory",
    ),
    (["--workdir=FOLDER/" + 300 * "x"], "cannot be used", "File name too long"),
    (["--workdir=FOLDER/loop"], "FOLDER/loop cannot be used"),
    (["--profile=5-2"], "--profile=5-2: write it as FIRST-LAST"),
    (["--process_id=0"], "--coordinator_address is missing"),
    (
        ["--num_processes=1", "--process_id=0", "--coordinator_address=here"],
        "--coordinator_address=here: write it as HOST:PORT, e.g. 10.0.0.1:8476",
    ),
    (["--num_processes=0"], "--num_processes=0"),
    (["run"], "'run' is not an option: write options as --name=value"),
    (["--wandb_project=x"], "--wandb_project=x needs wandb"),
]


@pytest.mark.parametrize(
    ("given", "words"), [(given, words) for given, *words in COMMANDS], ids=str
)
def test_a_command_that_cannot_be(recipe, tmp_path, given, words):
    if "--wandb_project=x" in given:
        with pytest.raises(ImportError):
            import wandb  # noqa: F401
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    given = [argument.replace("FOLDER", str(tmp_path)) for argument in given]
    if not any(argument.startswith("--workdir") for argument in given):
        given.append(f"--workdir={tmp_path / 'new'}")
    with unharmed(tmp_path):
        done = script("train", f"--config={recipe}", *given, cwd=tmp_path)
        refused(done, *(word.replace("FOLDER", str(tmp_path)) for word in words))


RECIPES = [
    ("def get_config():\n    return 3\n", "get_config returned 3: return a ConfigDict"),
    (
        "def get_config():\n    return {}\n",
        "get_config returned {}: return a ConfigDict",
    ),
    (
        "def get_config():\n    return {'task': 'sequence_to_sequence', 'extra': 1}\n",
        "'extra': 1}: return a Conf",
    ),
    ("x = 1\n", "get_config"),
]


@pytest.mark.parametrize(("text", "words"), [(text, words) for text, *words in RECIPES])
def test_a_recipe_that_gives_no_config(tmp_path, text, words):
    (tmp_path / "recipe.py").write_text(text)
    with unharmed(tmp_path, new=("__pycache__",)):
        refused(
            script(
                "train",
                f"--config={tmp_path / 'recipe.py'}",
                f"--workdir={tmp_path / 'new'}",
            ),
            *words,
        )


def _without(names: str):
    def change(workdir: Path) -> None:
        for path in list(workdir.glob(names)):
            path.unlink()

    return change


def _holding(names: str, text: str):
    def change(workdir: Path) -> None:
        for path in workdir.glob(names):
            path.write_text(text)

    return change


def _checkpoints_as_a_file(workdir: Path) -> None:
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").write_text("")


DAMAGES = {
    "no manifests": (
        _without("checkpoints/*/manifest.json"),
        "none of the steps 2, 4 has a manifest.json. Restore",
    ),
    "torn manifests": (
        _holding("checkpoints/*/manifest.json", "{"),
        "no valid checkpoint left",
        "from a backup",
    ),
    "no meta": (
        _without("checkpoints/*/meta/meta.json"),
        "no valid checkpoint left",
        "meta/meta.json is listed in manifest.json but missing",
    ),
    "no tokenizer": (
        _without("tokenizer.json"),
        "tokenizer.json is missing",
        "restore the file",
    ),
    "torn tokenizer": (
        _holding("tokenizer.json", '{"version"'),
        "Cannot load the tokenizer",
        "from a backup",
    ),
    "no config": (_without("config.json"), "has checkpoints but no config.json"),
    "torn config": (_holding("config.json", "{"), "config.json: it is damaged"),
    "lock as a folder": (
        lambda workdir: (workdir / "lock.json").mkdir(),
        "lock.json",
        "cannot be written",
    ),
    "metrics as a folder": (
        lambda workdir: (
            _without("metrics.jsonl")(workdir),
            (workdir / "metrics.jsonl").mkdir(),
        ),
        "metrics.jsonl",
    ),
    "checkpoints as a file": (_checkpoints_as_a_file, "checkpoints"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_workdir_loses_no_more(recipe, trained, tmp_path, damage):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    change, *words = DAMAGES[damage]
    change(workdir)
    events = [path.name for path in workdir.glob("events.*")]
    with unharmed(workdir / "checkpoints", workdir / events[0]):
        done = script(
            "train",
            f"--config={recipe}",
            f"--workdir={workdir}",
            "--config.training.steps=6",
        )
        refused(done, *words)
    assert list(workdir.glob("lock.json/*")) == []
    assert not (workdir / "lock.json").is_file()


@pytest.mark.parametrize(
    "line", ['{"a": 1}', "3", '{"step": "two"}', "\xff", '{"step": 2, "spl']
)
def test_a_line_of_metrics_that_is_no_row_is_passed_over(
    recipe, trained, tmp_path, line
):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    before = (workdir / "metrics.jsonl").read_text()
    (workdir / "metrics.jsonl").write_bytes(
        before.encode() + line.encode("latin-1") + b"\n"
    )
    done = script("train", f"--config={recipe}", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr.decode()
    assert b"metrics.jsonl: skipped an invalid line" in done.stderr
    assert (workdir / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("steps", [4, 3])
def test_a_run_that_is_finished_says_so(recipe, trained, steps):
    """The run's config.json keeps the number of steps that it was trained with."""
    with unharmed(trained):
        done = script(
            "train",
            f"--config={recipe}",
            f"--workdir={trained}",
            f"--config.training.steps={steps}",
        )
        said = done.stderr.decode()
    assert done.returncode == 0, said
    assert (
        "nothing to train: the newest checkpoint is step 4, "
        f"training.steps is {steps}. To continue, set a" in said
    )
    assert json.loads((trained / "config.json").read_text())["training"]["steps"] == 4


def test_other_keys_in_a_workdir(recipe, trained):
    with unharmed(trained):
        refused(
            script(
                "train",
                f"--config={recipe}",
                f"--workdir={trained}",
                "--config.model.d_ff=48",
            ),
            "holds another experiment; choose another --workdir",
            "config.model.d_ff: 24 in the workdir, 48 now",
        )


@pytest.mark.parametrize(
    "limit", [20_000, pytest.param(60_000, marks=pytest.mark.slow)]
)
def test_a_disk_that_fills_before_the_first_save_is_one_message(
    recipe, tmp_path, limit
):
    """A limit on the size of files stands in for a full disk: writing fails in the same
    places.

    TensorStore decides by time how many arrays share a file, so one array alone must
    exceed the limit.
    """
    command = [
        "prlimit",
        f"--fsize={limit}",
        sys.executable,
        "scripts/train.py",
        f"--config={recipe}",
    ]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path / 'run'}", "--config.model.d_ff=4096"],
        cwd=ROOT,
        env=os.environ | STORES_NO_PROGRAMS,
        capture_output=True,
        check=False,
        timeout=300,
    )
    refused(
        done,
        f"step 2 was not saved in {tmp_path / 'run'}/checkpoints "
        "(there is no earlier step)",
        "disk has room",
    )
    for words in (b"never retrieved", b"Event loop is closed", b"_SignalingThread"):
        assert words not in done.stderr
    assert not (tmp_path / "run" / "lock.json").exists()
