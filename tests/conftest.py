"""Settings and fixtures of all tests, and a corpus small enough to train on in
seconds.
"""

import atexit
import gc
import hashlib
import importlib.util
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import broken
import jax
import jax.numpy as jnp
import pytest
from forked import script
from ml_collections import ConfigDict

from transformer_jax import experiment
from transformer_jax.config import defaults
from transformer_jax.config import shrink as make_small
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training import profiling
from transformer_jax.training.initialization import TrainState

pytest_plugins = ["quick"]
# The collector would often look at all objects that JAX and the packages keep.
gc.freeze()
gc.set_threshold(10_000, 10, 10)
jax.config.update("jax_numpy_rank_promotion", "raise")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Compiling takes most of the time of these tests. Workers and scripts inherit the
    # variables. One module of LLVM for a program, instead of up to 32, saves a quarter
    # of it. Without fusion emitters it takes half as long; JAX 0.11 does not know that
    # flag and would abort.
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    if jax.version.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    # Threads of NumPy and PyTorch that wait for a core, which another worker uses, keep
    # theirs busy: a product of 0.3 s took 9 s.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    PROGRAMS = tempfile.mkdtemp(prefix="transformer_jax-programs-")
    atexit.register(shutil.rmtree, PROGRAMS, ignore_errors=True)
    settings: dict[str, Any] = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": PROGRAMS,
        # JAX locks a cache of limited size only
        "jax_compilation_cache_max_size": 2**31,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    for key, value in settings.items():
        os.environ[key.upper()] = str(value)
        jax.config.update(key, value)
# For processes that are killed, or that cannot write: a torn program would keep JAX
# 0.10 from storing any other one.
STORES_NO_PROGRAMS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
logging.getLogger("transformer_jax").setLevel(logging.INFO)

ROOT = Path(__file__).parents[1]

RECIPE = """
from transformer_jax.config import defaults, parse_arg

def get_config(arg=None):
    choice = parse_arg(arg, {"norm": ("post", "pre")})
    config = defaults("sequence_to_sequence")
    config.data.directory = "DIRECTORY"
    config.data.max_length = 32
    config.data.batch_tokens = 1024
    config.data.max_buckets = 1
    model = config.model
    model.source_vocab_size = model.target_vocab_size = 300
    model.num_encoder_layers = model.num_decoder_layers = 1
    model.d_model = 16
    model.d_ff = 24
    model.num_heads = 2
    model.head_dim = model.value_dim = 8
    model.max_length = 32
    model.norm = choice["norm"]
    config.optimizer.warmup_steps = 10
    config.training.steps = 4
    config.training.log_every = 2
    config.training.evaluate_every = 2
    config.checkpoint.every = 2
    config.decoding.max_extra = 5
    return config
"""


def write_corpus(
    directory: Path, pairs: int = 60, languages: tuple[str, ...] = ("en", "de", "fr")
) -> None:
    """Write a corpus of made-up words.

    Each language spells the same words in its own way.

    Training sentences have 1–6 words. Other sentences have 1–3, because translation
    compiles a program for each length. In `{split}.txt`, three sentences are a
    document. In `{split}.tsv`, each is a row, with its reversal, the number of its
    first word as the value, "even" or "odd" as the label, and 0 or 1 for these. In
    `{split}.json`, each is a context, the answer to whose first word is its last word.
    In `{split}.conll`, every word with an "a" is a place.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in (
        ("train", pairs),
        ("val", 11),
        ("test", 7),
        ("test_2016_flickr", 7),
        ("validation", 11),
    ):
        longest = 6 if split == "train" else 3
        rows = [
            [draw.randrange(20) for _ in range(draw.randint(1, longest))]
            for _ in range(count)
        ]
        for language in languages:
            lines = [
                " ".join(f"{language[0]}{'aeiou'[w % 5]}{'kmst'[w // 5]}" for w in row)
                for row in rows
            ]
            (directory / f"{split}.{language}").write_text("\n".join(lines) + "\n")
        table = [
            f"{line}\t{line[::-1]}\t{row[0]}"
            f"\t{'odd' if row[0] % 2 else 'even'}\t{row[0] % 2}\n"
            for line, row in zip(lines, rows, strict=True)
        ]
        (directory / f"{split}.tsv").write_text(
            "sentence\treversed\tvalue\tlabel\tnumber\n" + "".join(table)
        )
        tagged = [
            "".join(
                f"{word}\t{'B-LOC' if 'a' in word else 'O'}\n" for word in line.split()
            )
            for line in lines
        ]
        (directory / f"{split}.conll").write_text("\n".join(tagged))
        documents = ["\n".join(lines[i : i + 3]) + "\n" for i in range(0, count, 3)]
        (directory / f"{split}.txt").write_text("\n".join(documents))
        write_questions(directory / f"{split}.json", lines)


def write_questions(path: Path, contexts: Sequence[str]) -> None:
    """Write a question about each context in the layout of SQuAD: its first word,
    answered by its last word.
    """
    paragraphs = []
    for i, context in enumerate(contexts):
        first, last = context.split()[0], context.split()[-1]
        answer = {"text": last, "answer_start": len(context) - len(last)}
        paragraphs.append(
            {
                "context": context,
                "qas": [{"id": str(i), "question": first, "answers": [answer]}],
            }
        )
    path.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))


def shrink(config: ConfigDict, directory: Path, steps: int = 4) -> ConfigDict:
    """Shrink `config` in place to train on the corpus of `write_corpus` in seconds.

    Other keys keep their values.
    """
    make_small(config)
    data = config.data
    data.source, data.directory = "files", str(directory)
    if "choice_columns" in data:
        data.update(
            text_column="sentence",
            second_column="",
            choice_columns=("reversed", "label"),
        )
        data.label_column = "number"
    elif "label_column" in data:
        data.text_column, data.second_column = (
            "sentence",
            data.second_column and "reversed",
        )
        data.label_column = "label" if "labels" in data else "value"
    for key, value in {"labels": ("even", "odd"), "types": ("LOC",)}.items():
        if key in data:
            data[key] = value
    config.training.steps = steps
    config.training.log_every = config.training.evaluate_every = (
        config.checkpoint.every
    ) = 2
    return config


def small(task: str, directory: Path, architecture: str | None = None) -> ConfigDict:
    """Return the defaults of a task, shrunk for the corpus of `write_corpus`."""
    return shrink(defaults(task, architecture), directory)


def run(config: ConfigDict, workdir: Path, **changes: Any) -> TrainState:
    """Train like scripts/train.py, with some keys changed, e.g. training__steps=6.

    Return the last state.
    """
    config = ConfigDict(config.to_dict())
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return experiment.run(config, workdir).state


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [
        json.loads(line)
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of the device's speed, which takes a second in every run
    that reports.
    """
    monkeypatch.setattr(
        profiling, "peak_flops", lambda dtype: ("matmul_utilization", 1e11)
    )


@pytest.fixture
def without_search() -> Iterator[None]:
    """Translate nothing in evaluations. The program of a search takes long to
    compile.
    """

    def evaluate(self, params, batch, greedy):
        rows = len(batch["source"])
        numbers = {
            name: jnp.zeros((rows, 1)) for name in ("scores", "log_probabilities")
        }
        return {"loss": self._cross_entropy(params, batch)}, {
            "tokens": jnp.full((rows, 1, 1), 2),
            **numbers,
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceToSequence, "evaluate", evaluate)
        yield


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture
def tiny(corpus: Path) -> ConfigDict:
    """Shrunk translation config with the paper's defaults."""
    return small("sequence_to_sequence", corpus)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_corpus(folder / "corpus")
    path = folder / "tiny.py"
    path.write_text(RECIPE.replace("DIRECTORY", str(folder / "corpus")))
    return path


@pytest.fixture(scope="session")
def trained(recipe, tmp_path_factory) -> Path:
    """Workdir of a run of `recipe`, beside the file "stderr". Copy it before changing
    it.
    """
    workdir = tmp_path_factory.mktemp("trained") / "run"
    done = script("train", f"--config={recipe}", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr.decode()
    (workdir.parent / "stderr").write_bytes(done.stderr)
    return workdir


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory) -> Path:
    """Folder with a trained run and files that a user may pass to a script by
    mistake.
    """
    return broken.make(tmp_path_factory.mktemp("place"), trained)


def other_than(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    return (
        f"{value}x"
        if isinstance(value, str)
        else (*value, "x")
        if isinstance(value, tuple)
        else value + 1
    )


def get_config(name: str, arg: str) -> ConfigDict:
    """Return the config of a recipe in configs/."""
    path = ROOT / "configs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"configs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


@pytest.fixture
def stand_ins(tmp_path, monkeypatch) -> Path:
    """Folder for files with the names of a tfds data set's downloads.

    Their sha256 sums count as the known ones.
    """
    from transformer_jax.data.corpora import download

    folder = tmp_path / "fetched"
    folder.mkdir()
    original = download.known_files

    def known_files(builder):
        there = {
            url: folder / info.filename
            for url, info in original(builder).items()
            if info.filename
        }
        return {
            url: SimpleNamespace(
                filename=path.name,
                checksum=hashlib.sha256(path.read_bytes()).hexdigest(),
            )
            for url, path in there.items()
            if path.exists()
        }

    monkeypatch.setattr(download, "known_files", known_files)
    return folder


@pytest.fixture
def no_network(monkeypatch) -> None:
    """Send every request to a port on which nothing listens."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def real_data(name: str) -> Path:
    """Return the folder of a real data set, or skip the test if it is missing."""
    folder = (
        Path(os.environ.get("TRANSFORMER_JAX_DATA", ROOT.parent / "shared" / "data"))
        / name
    )
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}: set TRANSFORMER_JAX_DATA")
    return folder


ON_CPUS = """import warnings
warnings.simplefilter("error")
import jax
jax.config.update("jax_platforms", "cpu")
"""


def on_devices(count: int, program: str) -> str:
    """Return the output of a Python program that runs on `count` simulated devices.

    The program runs in a process forked from one that has not used JAX yet, because
    the number of devices is fixed when JAX computes first.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.with_suffix(".py").write_text(ON_CPUS + program)
        done = script(str(path), environment={"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def in_a_new_process(program: str) -> str:
    """Return the output of a Python program that runs on CPUs in a new process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
