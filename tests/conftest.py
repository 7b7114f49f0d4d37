"""Settings and fixtures of all tests, and a corpus small enough to train on in seconds."""

import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import broken
import jax
import pytest
from ml_collections import ConfigDict

from transformer_jax import experiment
from transformer_jax.config import defaults
from transformer_jax.config import shrink as make_small
from transformer_jax.training import profiling
from transformer_jax.training.initialization import TrainState

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time of these tests
logging.getLogger("transformer_jax").setLevel(logging.INFO)

ROOT = Path(__file__).parents[1]

RECIPE = """
from transformer_jax.config import defaults, parse_arg

def get_config(arg=None):
    choice = parse_arg(arg, {"norm": ("post", "pre")})
    config = defaults("sequence_to_sequence")
    config.data.directory = "DIRECTORY"
    config.data.max_length, config.data.batch_tokens, config.data.max_buckets = 32, 1024, 1
    model = config.model
    model.source_vocab_size = model.target_vocab_size = 300
    model.num_encoder_layers = model.num_decoder_layers = 1
    model.d_model, model.d_ff, model.num_heads, model.head_dim, model.value_dim = 16, 24, 2, 8, 8
    model.max_length, model.norm = 32, choice["norm"]
    config.optimizer.warmup_steps = 10
    config.training.steps = 4
    config.training.log_every = config.training.evaluate_every = config.checkpoint.every = 2
    config.decoding.max_extra = 5
    return config
"""


def write_corpus(directory: Path, pairs: int = 60, languages: tuple[str, ...] = ("en", "de", "fr")) -> None:
    """Write a corpus of made-up words. Each language spells the same words in its own way.

    Training sentences have 1–6 words. Other sentences have 1–3, because translation compiles a program for each length.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", pairs), ("val", 11), ("test", 7), ("test_2016_flickr", 7), ("validation", 11)):
        longest = 6 if split == "train" else 3
        rows = [[draw.randrange(20) for _ in range(draw.randint(1, longest))] for _ in range(count)]
        for language in languages:
            lines = [" ".join(f"{language[0]}{'aeiou'[w % 5]}{'kmst'[w // 5]}" for w in row) for row in rows]
            (directory / f"{split}.{language}").write_text("\n".join(lines) + "\n")
        table = [f"{line}\t{'odd' if row[0] % 2 else 'even'}\n" for line, row in zip(lines, rows, strict=True)]
        (directory / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(table))
        (directory / f"{split}.txt").write_text("\n".join(lines) + "\n")


def shrink(config: ConfigDict, directory: Path, steps: int = 4) -> ConfigDict:
    """Shrink `config` in place to train on a made-up corpus in seconds. All other keys keep their values."""
    make_small(config)
    config.data.source, config.data.directory = "files", str(directory)
    config.training.steps = steps
    config.training.log_every = config.training.evaluate_every = config.checkpoint.every = 2
    return config


def small(task: str, directory: Path) -> ConfigDict:
    """Return the defaults of a task, shrunk for the corpus of `write_corpus`."""
    config = shrink(defaults(task), directory)
    if "labels" in config.data:
        config.data.labels = ("even", "odd")
    return config


def run(config: ConfigDict, workdir: Path, **changes: Any) -> TrainState:
    """Train like scripts/train.py, with some keys changed, e.g. training__steps=6. Return the last state."""
    config = ConfigDict(config.to_dict())
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return experiment.run(config, workdir).state


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of the device's speed, which takes a second in every run that reports."""
    monkeypatch.setattr(profiling, "peak_flops", lambda dtype: ("matmul_utilization", 1e11))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture
def tiny(corpus: Path) -> ConfigDict:
    """Shrunk translation config with the paper's defaults."""
    return small("sequence_to_sequence", corpus)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_corpus(folder / "corpus")
    path = folder / "tiny.py"
    path.write_text(RECIPE.replace("DIRECTORY", str(folder / "corpus")))
    return path


@pytest.fixture(scope="module")
def place(recipe, tmp_path_factory) -> Path:
    """Folder with a trained run and files that a user may pass to a script by mistake."""
    return broken.make(tmp_path_factory.mktemp("place"), recipe)


def get_config(name: str, arg: str) -> ConfigDict:
    """Return the config of a recipe in configs/."""
    path = ROOT / "configs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"configs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


def real_data(name: str) -> Path:
    """Return the folder of a real data set, or skip the test if it is missing."""
    folder = Path(os.environ.get("TRANSFORMER_JAX_DATA", ROOT.parent / "shared" / "data")) / name
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}: set TRANSFORMER_JAX_DATA")
    return folder


def on_devices(count: int, program: str) -> str:
    """Return the output of a Python program that runs on `count` simulated devices.

    The program runs in a new process, because the number of devices is fixed when JAX starts.
    """
    flags = f"--xla_force_host_platform_device_count={count}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
