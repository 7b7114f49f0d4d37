#!/usr/bin/env bash
# Trains with N processes on this host, and restarts them when one dies:
#   scripts/launch/local.sh N --config=... --workdir=... [--config.a.b=v ...]
# See supervise.py for the exit codes and settings.
exec python "$(dirname "$0")/supervise.py" "$@"
