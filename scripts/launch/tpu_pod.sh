#!/usr/bin/env bash
# Trains on all hosts of a TPU pod slice. JAX connects the hosts by itself:
#   scripts/launch/tpu_pod.sh NAME ZONE --config=configs/wmt14.py:big --workdir=gs://bucket/big --config.mesh.fsdp=8
# Set up the hosts once:
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='git clone URL transformer_jax &&
#     cd transformer_jax && bash -c "source scripts/environment.sh .[gcs]" && .venv/bin/pip install "jax[tpu]"'
# The environment variable LIBTPU_INIT_ARGS, with options of the compiler, is passed on to the hosts. By default it is not
# set: none of those that we tried helped (docs/results/negative.md).
# The environment variable REPOSITORY names the cloned folder on the hosts (default: transformer_jax). When a host fails,
# all hosts restart, at most TRIES times in all (default: 10), after a pause that doubles from PAUSE (2 s) to 60 s. The
# script ends when the run finishes (exit code 0), has an error that a restart cannot fix (2), or is stopped here, e.g. by
# Ctrl-C, and has saved a checkpoint (75).
set -uo pipefail
(($# >= 3)) || { echo "usage: $0 NAME ZONE --config=FILE --workdir=DIR [--config.a.b=v ...]" >&2; exit 2; }
[[ ${TRIES:=10} =~ ^(0|[1-9][0-9]*)$ ]] || { echo "error: TRIES=$TRIES: must be a number, e.g. 10" >&2; exit 2; }
[[ ${PAUSE:=2} =~ ^(0|[1-9][0-9]*)$ ]] || { echo "error: PAUSE=$PAUSE: must be a number of seconds, e.g. 2" >&2; exit 2; }
name=$1 zone=$2
shift 2

everywhere() { gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }
signal() { everywhere "pkill -$1 -f '[s]cripts/train.py'; true"; } # the brackets keep pkill from matching its own shell

options=${LIBTPU_INIT_ARGS:+LIBTPU_INIT_ARGS=$(printf %q "$LIBTPU_INIT_ARGS") }
train="cd ${REPOSITORY:-transformer_jax} && PATH=\$PWD/.venv/bin:\$PATH && ${options}python scripts/train.py$(printf ' %q' "$@")"
stopping=
trap 'stopping=yes; signal TERM' INT TERM HUP USR1
for ((failures = 1; ; failures++)); do
    everywhere "$train" &
    wait $!
    code=$?
    while kill -0 $! 2>/dev/null; do wait $!; code=$?; done # a signal interrupts `wait`, not the training
    case $code in 0 | 2) exit $code ;; esac
    [[ -z $stopping ]] || exit $code
    ((failures <= TRIES)) || { echo "giving up after $TRIES restarts" >&2; exit $code; }
    pause=$((failures < 6 ? PAUSE * 2 ** (failures - 1) : 60))
    echo "exit code $code: restarting all hosts in $pause s ($failures of $TRIES)" >&2
    sleep "$pause" & wait $!
    [[ -z $stopping ]] || exit 75
    signal KILL # processes that hang without their peers
done
