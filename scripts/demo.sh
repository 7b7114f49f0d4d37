#!/usr/bin/env bash
# Usage: scripts/demo.sh [WORKDIR]    (default: runs/dates)
# Installs everything into .venv, trains a Transformer that reads dates (3 to 6 minutes), evaluates it, and translates a
# few dates. Needs Python 3.11 or newer. An interrupted training continues when the script is run again.
set -euo pipefail
workdir=${1:-runs/dates}
[[ $workdir = /* ]] || workdir=$PWD/$workdir
source "$(dirname "$0")/environment.sh" .

echo "== training in $workdir" >&2
python scripts/train.py --config=configs/dates.py --workdir="$workdir"
echo "== evaluating on 1,000 dates that are not in the training data" >&2
python scripts/evaluate.py --workdir="$workdir"
echo "== translating a few dates" >&2
dates=('March 5, 2021' '5. März 2021' '5 mars 2021' '1 de mayo de 1999' '31.12.1999' '12/31/1999')
read_as=$(printf '%s\n' "${dates[@]}" | python scripts/predict.py --workdir="$workdir")
paste -d '\t' <(printf '%s\n' "${dates[@]}") <(printf '%s\n' "$read_as")
printf '%s\n' "${dates[@]}" | python scripts/attention_report.py --workdir="$workdir" --output="$workdir/attention.html"
echo "== attention weights: open $workdir/attention.html in a browser" >&2
