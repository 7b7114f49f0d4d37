r"""Plot runs: logged values over training steps, or a metric over source lengths.

    python scripts/compare.py --workdirs=runs/a,runs/b --output=curves.svg \
        --values=loss,bleu
    python scripts/compare.py --workdirs=runs/a --output=norms.svg \
        --values='gradient_norm/*'
    python scripts/compare.py --workdirs=runs/a,runs/b --output=lengths.svg \
        --lengths=10,20,30 --values=bleu --split=val

With --lengths, each run predicts the split, and a table goes to stdout: run, lengths,
number of examples and score, separated by tabs. A length is a number of words or, if
the source is no text, of positions. `--config.a.b=v` then changes the config of every
run.
"""

import functools
import sys
from collections.abc import Mapping

from absl import flags

from transformer_jax import command_line
from transformer_jax.config import override, parse
from transformer_jax.errors import UserError
from transformer_jax.predictor import Predictor
from transformer_jax.report import curves
from transformer_jax.tasks import task_class
from transformer_jax.training.metric import Metric
from transformer_jax.training.metric import label as label_of
from transformer_jax.training.task import Config
from transformer_jax.workdir import read

WORKDIRS = flags.DEFINE_list(
    "workdirs", None, "comma-separated folders of runs", required=True
)
OUTPUT = flags.DEFINE_string(
    "output", None, "image file to write, in any format of matplotlib", required=True
)
VALUES = flags.DEFINE_list(
    "values",
    ["loss"],
    "names in metrics.jsonl, also with *, or with --lengths one metric, e.g. bleu",
)
LENGTHS = flags.DEFINE_list(
    "lengths",
    None,
    "plot by source length: upper limits of the length groups, in words or positions",
)
SPLIT = flags.DEFINE_string(
    "split", None, "split to predict with --lengths (default: config.data.test_split)"
)
command_line.define_task()

OVERRIDES, ARGV = command_line.split_overrides()


def main() -> None:
    if not WORKDIRS.value or not all(WORKDIRS.value):
        raise UserError(
            "--workdirs is empty, or one of its names: "
            "name folders of runs, separated by commas"
        )
    curves.check_picture(OUTPUT.value)
    if not VALUES.value:
        raise UserError(
            "--values is empty: name at least one value, e.g. --values=loss"
        )
    for run in WORKDIRS.value:
        command_line.check_output(OUTPUT.value, workdir=run)
    if LENGTHS.value is None:
        if SPLIT.value or OVERRIDES:
            raise UserError(
                "--split and --config.… require --lengths: "
                "add it, e.g. --lengths=10,20,30"
            )
        runs = {
            run: {
                name: curves.read_family(run, name)
                if curves.is_family(name)
                else curves.read_curves(run, name)
                for name in VALUES.value
            }
            for run in WORKDIRS.value
        }
        curves.draw_curves(OUTPUT.value, runs, label)
    elif len(VALUES.value) != 1 or VALUES.value == ["loss"]:
        raise UserError(
            f"--values={','.join(VALUES.value)}: "
            "--lengths plots one metric, e.g. --values=bleu"
        )
    else:
        metric = VALUES.value[0]
        scores, axis_label = by_length(curves.check_edges(LENGTHS.value), metric)
        curves.draw_by_length(OUTPUT.value, scores, metric, axis_label)
    print(f"wrote {OUTPUT.value}", file=sys.stderr)


def label(run: str, split: str, value: str) -> str:
    """Return the label of a value, with the way it was computed if the run's config
    says so, e.g. "bleu (greedy)".
    """
    config = parsed(run)
    if config is None:
        return value
    if split == "train":
        return config.training.loss_label if value == "loss" else value
    return label_of(task_class(config.task).metrics, value)


@functools.cache
def parsed(run: str) -> Config | None:
    """Return the config of a run, or None if it cannot be read, e.g. if the folder
    has only metrics.jsonl.
    """
    try:
        return parse(read(run))
    except ValueError:
        return None


def by_length(
    edges: list[int], metric: str
) -> tuple[dict[str, list[curves.LengthScore]], str]:
    """Predict the split with every run and print the table.

    Return the scores per run, and a label for the lengths.
    """
    configs = {run: read(run) for run in WORKDIRS.value}
    # report any config problem before the first run predicts
    for config in configs.values():
        override(config, OVERRIDES)
        check_metric(task_class(parse(config).task).metrics, metric)
    scores = {}
    labels = set()
    for run, config in configs.items():
        predictor = Predictor(run, config)
        task = predictor.task
        batches = task.batches(SPLIT.value or config.data.test_split, None)
        predictions = predictor.predict(batches.records, scored=True)
        score = functools.partial(task.score, {})
        scores[run] = curves.score_by_length(
            batches.records,
            predictions,
            batches.references,
            edges,
            metric,
            score,
            batches.lengths,
        )
        is_text = batches.lengths is None
        labels.add("source length (words)" if is_text else "source length (positions)")
    for run, parts in scores.items():
        for part in parts:
            print(
                f"{run}\t{part.shortest}-{part.longest}"
                f"\t{part.examples}\t{part.score:.4g}"
            )
    return scores, " or ".join(sorted(labels))


def check_metric(metrics: Mapping[str, Metric], name: str) -> None:
    """Raise ValueError unless predictions alone give this metric."""
    choices = [choice for choice in metrics if metrics[choice].of_predictions]
    if name not in choices:
        raise UserError(
            f"there is no metric {name!r}: those of predictions are "
            f"{', '.join(choices) or 'none'}"
        )


if __name__ == "__main__":
    command_line.run(main, ARGV, distributed=False)
