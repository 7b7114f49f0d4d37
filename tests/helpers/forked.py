"""Run scripts in processes forked from one that has imported JAX. The import takes
most of the time of a short run.
"""

import contextlib
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helpers import ROOT
from transformer_jax.training import profiling

PRELOADED = (
    "pytest",
    "helpers.forked",
    "transformer_jax.command_line",
    "transformer_jax.conversion",
    "transformer_jax.experiment",
    "transformer_jax.predictor",
    "transformer_jax.verification",
    "transformer_jax.report.attention",
    "transformer_jax.report.curves",
    "transformer_jax.tasks.bert_pretraining",
    "transformer_jax.tasks.classification",
    "transformer_jax.tasks.language_modeling",
    "transformer_jax.tasks.sequence_to_sequence",
    "ml_collections.config_flags",
    "transformer_jax.claims.results",  # imports scipy.stats
    # imported by functions
    "orbax.checkpoint",
    "pyarrow.compute",
    "tensorboardX",
    "tqdm.contrib.logging",
)

# Whenever JAX stores a program, it reads the sizes of all that are there. The limit of
# the cache only serves to lock it and is never reached.
with contextlib.suppress(ImportError):
    from jax._src import lru_cache

    lru_cache.LRUCache._evict_if_needed = lambda self, **_: None

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(list(PRELOADED))


def script(
    name: str,
    *arguments: str,
    stdin: bytes = b"",
    cwd: Path = ROOT,
    environment: dict[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess:
    """Run scripts/NAME.py as a command.

    Variables that JAX reads on import, e.g. JAX_PLATFORMS, have no effect.

    Raises:
        subprocess.TimeoutExpired: the script takes longer than `timeout` seconds.
    """
    with begun(
        ROOT / "scripts" / f"{name}.py",
        *arguments,
        stdin=stdin,
        cwd=cwd,
        environment=environment,
    ) as running:
        return running.end(timeout)


class Running:
    """A script that runs. Its output is in the files "1" and "2" of `folder`."""

    def __init__(
        self, argv: list[str], folder: Path, cwd: Path, environment: dict[str, str]
    ):
        self._argv, self.folder = argv, folder
        self._process = _processes.Process(
            target=_run, args=(argv, str(folder), str(cwd), environment)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, timeout: float = 300) -> subprocess.CompletedProcess:
        """Wait for the end. A script that was killed by signal N has the exit code
        -N.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self._argv, timeout)
        stdout, stderr = (
            (self.folder / "1").read_bytes(),
            (self.folder / "2").read_bytes(),
        )
        return subprocess.CompletedProcess(
            self._argv, self._process.exitcode, stdout, stderr
        )


@contextlib.contextmanager
def begun(
    path: Path,
    *arguments: str,
    stdin: bytes = b"",
    cwd: Path = ROOT,
    environment: dict[str, str] | None = None,
) -> Iterator[Running]:
    """Start a script, given by its path."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "0").write_bytes(stdin)
        yield Running([str(path), *arguments], Path(folder), cwd, environment or {})


def _run(argv: list[str], folder: str, cwd: str, environment: dict[str, str]) -> None:
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    for number, mode in enumerate(
        (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
    ):
        os.dup2(os.open(os.path.join(folder, str(number)), mode), number)
    # The streams stay open when a script replaces them.
    sys.stdin = sys.__stdin__ = os.fdopen(0)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w")
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w")
    os.chdir(cwd)
    os.environ.update(environment)
    # Measuring the speed of the device takes a second in every run that reports.
    profiling.matrix_rate = lambda dtype, n, chain: 1e11
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")
