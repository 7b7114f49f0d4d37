#!/usr/bin/env bash
# From a machine with git, a shell and Python >= 3.11 to a trained Transformer that reads dates:
# scripts/demo.sh [WORKDIR]. Run again, it goes on where it stopped and translates.
set -euo pipefail
workdir=${1:-runs/dates}
[[ $workdir = /* ]] || workdir=$PWD/$workdir
source "$(dirname "$0")/environment.sh" .

echo "== training in $workdir" >&2
python scripts/train.py --config=configs/dates.py --workdir="$workdir"
echo "== 1,000 dates that it has not seen" >&2
python scripts/evaluate.py --workdir="$workdir"
echo "== a few of one's own" >&2
dates=('March 5, 2021' '5. März 2021' '5 mars 2021' '1 de mayo de 1999' '31.12.1999' '12/31/1999')
read_as=$(printf '%s\n' "${dates[@]}" | python scripts/predict.py --workdir="$workdir")
paste -d '\t' <(printf '%s\n' "${dates[@]}") <(printf '%s\n' "$read_as")
printf '%s\n' "${dates[@]}" | python scripts/attention_report.py --workdir="$workdir" --output="$workdir/attention.html"
echo "== what looks at what: open $workdir/attention.html in a browser" >&2
