r"""Count an n-gram language model and evaluate it, or score texts with it.

    python scripts/ngram.py --config=configs/lm.py:ngram,order=5 --workdir=runs/ngram \
        --config.data.directory=DIR
    python scripts/ngram.py --workdir=runs/ngram --input=texts.txt --output=scores.jsonl

With --config, the model is counted on the training split and stored in the workdir;
without it, the one stored there is used. The scores of a split are printed as one JSON
line. With --input, a line is written for each line instead, with the log-likelihood of
the text, as predict.py --score does for trained models. An n-gram model has no
gradients and no steps, so train.py cannot make one.
"""

import sys

from absl import flags

from transformer_jax import command_line, files
from transformer_jax.baselines import counted
from transformer_jax.errors import UserError
from transformer_jax.training.logging import json_line

CONFIG = command_line.define_recipe(required=False)
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the model", required=True)
SPLIT = flags.DEFINE_string(
    "split", None, "split to evaluate (default: config.data.test_split)"
)
INPUT = flags.DEFINE_string("input", None, "file of texts to score, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "-", "file to write, or - for stdout")
ARPA = flags.DEFINE_string("arpa", None, "also write the model to this ARPA file")


def main() -> None:
    command_line.check_output(OUTPUT.value, INPUT.value, WORKDIR.value)
    if ARPA.value is not None:
        command_line.check_output(ARPA.value, INPUT.value, WORKDIR.value)
    if INPUT.value is not None and SPLIT.value is not None:
        raise UserError("--split evaluates and --input scores texts: give one of them")
    lines = []
    if INPUT.value is not None:
        lines = command_line.read_lines(INPUT.value)
    if CONFIG.value is None:
        run = counted.load(WORKDIR.value)
    else:
        run = counted.count(CONFIG.value, WORKDIR.value)
    if ARPA.value is not None:
        run.write_arpa(ARPA.value)
    if INPUT.value is None:
        results = [json_line(run.evaluate(SPLIT.value))]
    else:
        results = [files.one_line(each) for each in run.predict(lines)]
    text = "".join(f"{line}\n" for line in results).encode()
    if OUTPUT.value == "-":
        sys.stdout.buffer.write(text)
    else:
        files.write(OUTPUT.value, text)


if __name__ == "__main__":
    command_line.run(main, distributed=False)
