#!/usr/bin/env bash
# Usage: scripts/test.sh [PYTEST ARGUMENTS]
# Installs everything into .venv, then runs the linter, the format check, the type checker and the tests. Needs Python
# 3.11 or newer.
set -euo pipefail
source "$(dirname "$0")/environment.sh" '.[test]'
ruff check .
ruff format --check .
mypy
python -m pytest -n 2 "$@"
