"""Run scripts in processes forked from one that has imported JAX. The import takes most of the time of a short run."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "pytest",
    "forked",
    "transformer_jax.command_line",
    "transformer_jax.experiment",
    "transformer_jax.predictor",
    "transformer_jax.verification",
    "transformer_jax.report.attention",
    "transformer_jax.report.curves",
    "ml_collections.config_flags",
)

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
    """Run scripts/NAME.py as a command. Variables that JAX reads on import, e.g. JAX_PLATFORMS, have no effect.

    Raises:
        subprocess.TimeoutExpired: the script takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "0").write_bytes(stdin)
        argv = [str(ROOT / "scripts" / f"{name}.py"), *arguments]
        process = _processes.Process(target=_run, args=(argv, folder, str(cwd), environment or {}))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(argv, timeout)
        stdout, stderr = (Path(folder) / "1").read_bytes(), (Path(folder) / "2").read_bytes()
        return subprocess.CompletedProcess(argv, process.exitcode, stdout, stderr)


def _run(argv: list[str], folder: str, cwd: str, environment: dict[str, str]) -> None:
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(os.path.join(folder, str(number)), mode), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")
