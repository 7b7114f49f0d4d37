#!/usr/bin/env bash
# Usage: scripts/test.sh [PYTEST ARGUMENTS]
# Installs everything into .venv, then runs the linter, the format check, the type checker and the tests. Needs Python
# 3.11 or newer. EXTRAS=tpu also installs libtpu (700 MB), with which steps are compiled for TPUs.
set -euo pipefail
source "$(dirname "$0")/environment.sh" ".[test${EXTRAS:+,$EXTRAS}]"
ruff check .
ruff format --check .
mypy
python -m pytest -n 3 "$@" # more processes than cores, since many tests wait
