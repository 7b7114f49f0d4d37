"""Draws runs side by side: the values that they logged, over steps, or their BLEU over the length of the source.

    python scripts/compare.py --workdirs=runs/a,runs/b --output=curves.svg --values=loss,bleu
    python scripts/compare.py --workdirs=runs/a,runs/b --output=lengths.svg --lengths=10,20,30 --split=val

By length each run translates the split, and a table is written too. `--config.a.b=v` changes all the runs' configs.
"""

import sys

from absl import flags

from transformer_jax import command_line
from transformer_jax.config import override, parse, read_workdir
from transformer_jax.predictor import Predictor
from transformer_jax.report import curves

WORKDIRS = flags.DEFINE_list("workdirs", None, "the folders of runs", required=True)
OUTPUT = flags.DEFINE_string("output", None, "the picture: .svg, .png or another that matplotlib writes", required=True)
VALUES = flags.DEFINE_list("values", None, "what is drawn over steps, of what metrics.jsonl names: loss by default")
LENGTHS = flags.DEFINE_list("lengths", None, "draw BLEU by length: the most words that each part's sources have")
SPLIT = flags.DEFINE_string("split", None, "by length, what is translated: by default config.data.test_split")
TOKENIZED = flags.DEFINE_bool("tokenized", False, "by length, BLEU on the tokens as given, lower-cased")

OVERRIDES, ARGV = command_line.split_overrides()


def main() -> None:
    curves.check_picture(OUTPUT.value)
    command_line.check_output(OUTPUT.value)
    if not WORKDIRS.value:
        raise ValueError("--workdirs is empty: name the folder of a run, or several with commas between")
    if LENGTHS.value is None:
        if SPLIT.value or TOKENIZED.value or OVERRIDES:
            raise ValueError("--split, --tokenized and --config.… are for BLEU by length: add --lengths=10,20,30")
        runs = {
            run: {name: curves.read_curves(run, name) for name in VALUES.value or ["loss"]} for run in WORKDIRS.value
        }
        curves.draw_curves(OUTPUT.value, runs)
    elif VALUES.value is not None:
        raise ValueError("--values is for curves over steps, --lengths for BLEU by length: leave one out")
    else:
        curves.draw_bleu_by_length(OUTPUT.value, by_length(curves.check_edges(LENGTHS.value)))
    print(f"wrote {OUTPUT.value}", file=sys.stderr)


def by_length(edges: list[int]) -> dict[str, list[curves.LengthScore]]:
    configs = {run: read_workdir(run) for run in WORKDIRS.value}
    for config in configs.values():  # what is wrong with one shows before any translates
        override(config, OVERRIDES)
        config.decoding.n_best = 1
        parse(config)
    scores = {}
    for run, config in configs.items():
        predictor = Predictor(run, config)
        lines, references = predictor.task.examples(SPLIT.value or predictor.task.test_split)
        scores[run] = curves.bleu_by_length(lines, predictor.predict(lines), references, edges, TOKENIZED.value)
        for part in scores[run]:
            print(f"{run}\t{part.shortest}-{part.longest}\t{part.sentences}\t{part.bleu:.1f}")
    return scores


if __name__ == "__main__":
    command_line.run(main, ARGV, distributed=False)
