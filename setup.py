"""Refuse an old Python before pip looks for packages, and copy scripts and recipes into
a wheel.

Everything else is in pyproject.toml.
"""

import shutil
import sys
from pathlib import Path

# pip reads requires-python too late, after the dependencies
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        "error: transformer_jax needs Python 3.11 or newer, and this is Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}: remove the environment "
        "(rm -r .venv) and make it with a newer one, e.g. python3.11 -m venv .venv"
    )

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithScripts(build_py):
    """Also copy scripts/*.py and configs/*.py, for transformer_jax/shipped.py."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        copies = Path(self.build_lib) / "transformer_jax" / "_clone"
        for name in ("scripts", "configs"):
            (copies / name).mkdir(parents=True, exist_ok=True)
            for path in Path(name).glob("*.py"):
                shutil.copy(path, copies / name)


setup(cmdclass={"build_py": BuildWithScripts})
