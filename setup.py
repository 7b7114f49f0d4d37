"""Refuse an old Python before pip looks for packages.

Everything else is in pyproject.toml.
"""

import sys

# pip reads requires-python too late, after the dependencies
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        "error: transformer_jax needs Python 3.11 or newer, and this is Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}: remove the environment "
        "(rm -r .venv) and make it with a newer one, e.g. python3.11 -m venv .venv"
    )

from setuptools import setup

setup()
