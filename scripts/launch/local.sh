#!/usr/bin/env bash
# Trains with N processes on this host, started again when one dies:
# scripts/launch/local.sh N --config=... --workdir=... [--config.a.b=v ...]
exec python "$(dirname "$0")/supervise.py" "$@"
