#!/usr/bin/env bash
# Usage: scripts/benchmark_gpu.sh OUTPUT DATA [steps|decoding|exactness|trainings]... [--rehearse]
# Measures on one GPU what docs/results/accelerators.md and docs/results/speed.md need, the most valuable first: each
# part in an estimated three to five minutes, all of them by default. DATA holds tinyshakespeare/input.txt, and the
# recordings of the Free Spoken Digit Dataset in fsdd. Each result is in OUTPUT/NAME.json as soon as it is known, its
# log in OUTPUT/NAME.log; the results of verify.py are tables. What fails or takes too long is left out, except the rows
# of a table that are known by then. --rehearse runs the same commands with small models, e.g. on a CPU. Comparisons
# need PyTorch, those of generation also transformers, and those of translation also CTranslate2 and sentencepiece.
set -uo pipefail
cd "$(dirname "$0")/.."
output=$1
data=$2
parts=()
rehearse=
for word in "${@:3}"; do
    case $word in
        --rehearse) rehearse=1 ;;
        steps | decoding | exactness | trainings) parts+=("$word") ;;
        *) echo "error: $word: choose steps, decoding, exactness, trainings or --rehearse" >&2; exit 2 ;;
    esac
done
mkdir -p "$output"

# wanted PART: true if this part was named, or none was
wanted() { [ ${#parts[@]} = 0 ] || [[ " ${parts[*]} " = *" $1 "* ]]; }

# measure NAME SECONDS COMMAND...: run a command for at most this many seconds, in a rehearsal ten times as long
measure() {
    local name=$1 limit=$2 start=$SECONDS state=done
    if [ "$rehearse" ]; then limit=$((10 * limit)); fi
    shift 2
    timeout "$limit" "$@" > "$output/$name.json" 2> "$output/$name.log" || state="failed ($?)"
    echo "$name: $state after $((SECONDS - start)) s: $(tail -n 1 "$output/$name.json" | cut -c 1-400)"
}

# Options of the comparisons, of attention and of trainings.
turns=(--rounds=6 --steps=20 --compile)
writing=(--rounds=5)
lengths=(--length=64,128,256,512,1024,2048,4096)
training=()
small=()
short=50
long=64
if [ "$rehearse" ]; then
    turns=(--rounds=2 --steps=1 --small)
    writing=(--rounds=2 --tokens=8 --length=8 --small)
    lengths=(--length=64,128 --positions=256 --heads=2 --rounds=2)
    training=(--config.training.steps=4 --config.training.evaluate_every=4 --config.checkpoint.every=4)
    small=(--config.model.num_layers=1 --config.model.unroll=1)
    short=4
    long=16
fi
no_dropout=--config.model.attention_dropout_rate=0
gpt2=(--config=configs/gpt.py:gpt2-small --config.data.batch_tokens=16384 "$no_dropout" --config.model.remat=none
    --config.model.unroll=12 --config.model.vocab_multiple=128)
bert=(--config=configs/bert.py:base --config.data.batch_tokens=32768 "$no_dropout" --config.model.unroll=12)
shakespeare=(--config=configs/gpt.py:shakespeare --config.data.directory="$data/tinyshakespeare")
speech=(--config=configs/speech.py:model=joint,data=words --config.data.directory="$data/fsdd")
steps=scripts/pytorch/steps.py

# length LONG: the length of a comparison
length() { if [ "$rehearse" ]; then echo "--length=$long"; else echo "--length=$1"; fi; }

if wanted steps; then
    measure big 120 python $steps --config=configs/wmt14.py:big --config.data.batch_tokens=32768 \
        --config.model.residual_dtype=bfloat16 "$(length 64)" "${turns[@]}"
    measure gpt2-small 90 python $steps "${gpt2[@]}" "$(length 1024)" "${turns[@]}"
    measure bert-128 90 python $steps "${bert[@]}" "$(length 128)" "${turns[@]}"
    measure bert-512 90 python $steps "${bert[@]}" "$(length 512)" "${turns[@]}"
    measure attention 90 python scripts/pytorch/attention.py "${lengths[@]}"
    measure attention-causal 90 python scripts/pytorch/attention.py --causal "${lengths[@]}"
fi

if wanted decoding; then
    for prompts in 1 32; do
        measure generation-$prompts 90 python scripts/pytorch/generation.py --config=configs/gpt.py:gpt2-small \
            --prompts=$prompts --static "${writing[@]}"
    done
    for sentences in 1 32; do
        measure translation-$sentences 90 python scripts/pytorch/translation.py --config=configs/wmt14.py:base \
            --sentences=$sentences "${writing[@]}"
    done
fi

# Exactness: kernels against the reference, two runs bit for bit, and a small model of each other family.
if wanted exactness; then
    measure verify 90 python scripts/verify.py "${shakespeare[@]}"
    export XLA_FLAGS="--xla_gpu_exclude_nondeterministic_ops=true ${XLA_FLAGS:-}"
    for run in first second; do
        measure exact-$run 60 python scripts/train.py "${shakespeare[@]}" --workdir="$output/runs/$run" \
            "${small[@]}" "${training[@]}" --config.training.steps=$short --config.optimizer.decay_steps=5000
        measure exact-$run-sum 30 python scripts/evaluate.py --workdir="$output/runs/$run"
    done
    export XLA_FLAGS="${XLA_FLAGS#* }"
    for recipe in multi30k.py:en-de rnn.py:additive convs2s.py t5.py:mini bert.py:mini gpt.py:llama-tiny \
        speech.py:model=joint digits.py; do
        measure "verify-${recipe%.py*}" 60 python scripts/verify.py --config=configs/$recipe
    done
fi

if wanted trainings; then
    measure shakespeare 240 python scripts/train.py "${shakespeare[@]}" --workdir="$output/runs/shakespeare" \
        "${small[@]}" "${training[@]}"
    measure shakespeare-loss 30 python scripts/evaluate.py --workdir="$output/runs/shakespeare"
    measure speech 240 python scripts/train.py "${speech[@]}" --workdir="$output/runs/speech" "${training[@]}"
    measure speech-errors 60 python scripts/evaluate.py --workdir="$output/runs/speech"
fi
