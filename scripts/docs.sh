#!/usr/bin/env bash
# Usage: scripts/docs.sh [--all]
# Installs the extra "docs" into .venv and builds the site in docs/_build/html. It fails on a warning, a link within the
# site that leads nowhere, anything loaded from the network, a public name without a docstring, and a page of the book
# with an error or a failed assert. Pages that run for more than a minute are executed with --all only.
set -euo pipefail
source "$(dirname "$0")/environment.sh" ".[docs]"
if [ "${1:-}" = --all ]; then
    export DOCS_ALL=1
    shift
fi
[ $# = 0 ] || { echo "usage: scripts/docs.sh [--all]" >&2; exit 2; }
rm -rf docs/_build
python -m sphinx --builder html --fail-on-warning --keep-going --quiet \
    --doctree-dir docs/_build/doctrees docs docs/_build/html
python docs/_extensions/check_site.py docs/_build/html
