# Sourced by demo.sh and test.sh: creates .venv with the versions of constraints.txt and puts it first on PATH. Its
# argument is what to install ("." or ".[test]"). UNPINNED=1 creates .venv-unpinned instead, with the newest versions that
# pyproject.toml allows. An environment that was made from the same files is used as it is; to renew one, remove it.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv pins=constraints.txt
if [ -n "${UNPINNED:-}" ]; then venv=.venv-unpinned pins=/dev/null; fi
stamp=$venv/installed-${1//[^a-z]/}
if ! cmp -s <(cat "$pins" pyproject.toml) "$stamp"; then
    echo "creating $venv (takes a minute or two)" >&2
    for python in python3 python3.13 python3.12 python3.11; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        python=
    done
    [ -n "$python" ] || { echo "error: no Python 3.11 or newer found: install one and run this again" >&2; exit 2; }
    { "$python" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --no-compile --quiet --quiet --disable-pip-version-check -c "$pins" -e "$1" &&
        cat "$pins" pyproject.toml >"$stamp"; } || { echo "error: installing into $venv failed, see above" >&2; exit 2; }
fi
export PATH="$PWD/$venv/bin:$PATH"
