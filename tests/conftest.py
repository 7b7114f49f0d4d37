"""Settings and fixtures of all tests."""

import atexit
import gc
import hashlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from helpers import broken
from helpers.corpus import write_corpus
from helpers.forked import script
from helpers.once import once
from helpers.runs import RECIPE, small
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training import profiling

pytest_plugins = ["helpers.slow", "helpers.quick"]
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
        # JAX locks a cache of limited size only, and looks at all its files before it
        # writes one. Reading a program takes 0.15 s.
        "jax_compilation_cache_max_size": 2**31,
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    for key, value in settings.items():
        os.environ[key.upper()] = str(value)
        jax.config.update(key, value)
logging.getLogger("transformer_jax").setLevel(logging.INFO)


def _hang_up(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# libtpu makes a process ignore SIGHUP unless it has a handler, and scripts that the
# process starts would inherit that.
if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
    signal.signal(signal.SIGHUP, _hang_up)


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
        return self.means(params, batch), {
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
    def make(folder: Path) -> None:
        write_corpus(folder / "corpus")
        text = RECIPE.replace("DIRECTORY", str(folder / "corpus"))
        (folder / "tiny.py").write_text(text)

    return once(tmp_path_factory, "recipe", make) / "tiny.py"


@pytest.fixture(scope="session")
def trained(recipe, tmp_path_factory) -> Path:
    """Workdir of a run of `recipe`, beside the file "stderr". Copy it before changing
    it.
    """

    def make(folder: Path) -> None:
        done = script("train", f"--config={recipe}", f"--workdir={folder / 'run'}")
        assert done.returncode == 0, done.stderr.decode()
        (folder / "stderr").write_bytes(done.stderr)

    return once(tmp_path_factory, "trained", make) / "run"


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory) -> Path:
    """Folder with a trained run and files that a user may pass to a script by
    mistake.
    """
    return broken.make(tmp_path_factory.mktemp("place"), trained)


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
