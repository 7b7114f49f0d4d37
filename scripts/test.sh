#!/usr/bin/env bash
# From a machine with git, a shell and Python >= 3.11 to the verdict: lint, format, types, tests.
set -euo pipefail
source "$(dirname "$0")/environment.sh" '.[test]'
ruff check .
ruff format --check .
mypy
python -m pytest -n 2 "$@"
