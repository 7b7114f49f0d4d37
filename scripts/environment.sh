# Sourced by demo.sh and test.sh: makes .venv with the pins of constraints.txt and activates it. Its argument is what
# to install ("." or ".[test]"). An environment made from the same pins is used as it is.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/installed-${1//[^a-z]/}
if ! cmp -s <(cat constraints.txt pyproject.toml) "$stamp"; then
    echo "making .venv: a minute or two" >&2
    for python in python3 python3.13 python3.12 python3.11; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        python=
    done
    [ -n "$python" ] || { echo "error: no Python 3.11 or newer found; install one and run this again" >&2; exit 2; }
    { "$python" -m venv .venv &&
        .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e "$1" &&
        cat constraints.txt pyproject.toml >"$stamp"; } || { echo "error: .venv is not complete, see above" >&2; exit 2; }
fi
export PATH="$PWD/.venv/bin:$PATH"
