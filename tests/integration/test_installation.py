"""What a new user meets first: the two commands of the README, and the refusal of an
old Python.
"""

import subprocess
import sys

import pytest

from helpers import ROOT


@pytest.mark.parametrize("command", ["scripts/demo.sh", "scripts/test.sh"])
def test_the_first_screen_of_the_readme_has_the_command_in_a_block(command):
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert f"```bash\n{command}\n```\n" in screen
    assert (
        subprocess.run(["bash", "-n", command], cwd=ROOT, check=False).returncode == 0
    )
    assert (ROOT / command).stat().st_mode & 0o111


def test_an_old_python_is_refused_before_pip_looks_for_packages():
    code = (
        "import runpy, sys; sys.version_info = (3, 10, 13); runpy.run_path('setup.py')"
    )
    refused = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert (
        "error: transformer_jax needs Python 3.11 or newer, and this is Python 3.10"
        in refused.stderr
    )


@pytest.mark.slow
def test_a_wheel_trains_in_a_new_environment_without_the_clone(tmp_path):
    """Needs a package index: the wheel is built with the setuptools of pyproject.toml
    and installed with everything that it depends on.
    """

    def run(*command, cwd=tmp_path):
        ran = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran

    run(sys.executable, "-m", "venv", "env")
    python = str(tmp_path / "env" / "bin" / "python")
    pip = (python, "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", ".", cwd=ROOT)
    wheel = next(tmp_path.glob("*.whl"))
    run(*pip, "install", f"--constraint={ROOT / 'constraints.txt'}", str(wheel))
    command = str(tmp_path / "env" / "bin" / "transformer-jax")
    trained = run(
        command,
        "train",
        "--config=dates",
        "--workdir=runs/dates",
        "--config.training.steps=2",
    )
    assert "python -m transformer_jax evaluate --workdir=runs/dates" in trained.stderr
    scores = run(python, "-m", "transformer_jax", "evaluate", "--workdir=runs/dates")
    assert '"examples": 1000' in scores.stdout
