"""Draws runs side by side: the values that they logged, over steps, or their BLEU over the length of the source.

    python scripts/compare.py --workdirs=runs/a,runs/b --output=curves.svg --values=loss,bleu
    python scripts/compare.py --workdirs=runs/a,runs/b --output=lengths.svg --by_length --split=val

By length each run translates the split, and a table is written too. `--config.a.b=v` changes all the runs' configs.
"""

import sys

from absl import flags

from transformer_jax import command_line
from transformer_jax.config import override, read_workdir
from transformer_jax.predictor import Predictor
from transformer_jax.report.curves import bleu_by_length, draw_bleu_by_length, draw_curves, read_curves

WORKDIRS = flags.DEFINE_list("workdirs", None, "the folders of runs", required=True)
OUTPUT = flags.DEFINE_string("output", None, "the picture: .svg, .png or another that matplotlib writes", required=True)
VALUES = flags.DEFINE_list("values", ["loss"], "what is drawn over steps, of what metrics.jsonl names")
BY_LENGTH = flags.DEFINE_bool("by_length", False, "draw BLEU over the source's words")
SPLIT = flags.DEFINE_string("split", None, "what is translated: by default config.data.test_split")
LENGTHS = flags.DEFINE_list("lengths", ["10", "20", "30", "40", "50"], "the most words that each part's sources have")
TOKENIZED = flags.DEFINE_bool("tokenized", False, "BLEU on the tokens as given, lower-cased")

OVERRIDES = [argument for argument in sys.argv if argument.startswith("--config.")]


def main() -> None:
    if BY_LENGTH.value:
        by_length()
    else:
        draw_curves(
            OUTPUT.value, {run: {name: read_curves(run, name) for name in VALUES.value} for run in WORKDIRS.value}
        )
    print(f"wrote {OUTPUT.value}", file=sys.stderr)


def by_length() -> None:
    try:
        edges = [int(length) for length in LENGTHS.value]
    except ValueError as error:
        raise ValueError(f"--lengths={','.join(LENGTHS.value)}: must be whole numbers, as 10,20,30") from error
    scores = {}
    for run in WORKDIRS.value:
        config = read_workdir(run)
        override(config, OVERRIDES)
        config.decoding.n_best = 1
        predictor = Predictor(run, config)
        lines, references = predictor.task.examples(SPLIT.value or predictor.task.test_split)
        found = predictor.predict(lines)
        scores[run] = bleu_by_length(lines, found, references, edges, TOKENIZED.value)
        for part in scores[run]:
            print(f"{run}\t{part.shortest}-{part.longest}\t{part.sentences}\t{part.bleu:.1f}")
    draw_bleu_by_length(OUTPUT.value, scores)


if __name__ == "__main__":
    command_line.run(main, [argument for argument in sys.argv if argument not in OVERRIDES])
