#!/usr/bin/env bash
# Usage: scripts/test.sh [--quick] [PYTEST ARGUMENTS]
# Installs everything into .venv, then runs the linter, the format check, the type checker and the tests. Needs Python
# 3.11 or newer. --quick runs the tests of mathematics, data and decoding and one tiny training of each task, and lists
# what it leaves out. EXTRAS=tpu also installs libtpu (700 MB), with which steps are compiled for TPUs.
# PROCESSES=N runs N tests at a time instead of 4.
set -euo pipefail
source "$(dirname "$0")/environment.sh" ".[test${EXTRAS:+,$EXTRAS}]"
ruff check .
ruff format --check .
# The type checker runs beside the tests and prints its result among theirs.
mypy &
types=$!
# There are more processes than cores, since many tests wait; those of --quick wait less. Each takes up to 2 GB of
# memory. Neighbouring tests share a process, and so its fixtures.
processes=${PROCESSES:-4}
if [[ " $* " = *" --quick "* ]]; then processes=3; fi
python -m pytest -n "$processes" --dist worksteal "$@" || tests=$?
wait "$types"
exit "${tests:-0}"
