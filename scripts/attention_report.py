r"""Draw a trained model's attention weights in one HTML file.

The file opens in a browser without a network. With --inside, it also shows gradient ×
input and, for GPT, BERT's pre-training and encoder–decoder Transformers, the logit
lens.

    python scripts/attention_report.py --workdir=runs/dates --input=lines.txt \
        --output=report.html

Each input line is one record. A line may hold several columns separated by tabs, in the
order of the task's data. For example, a translation model takes a source and a target;
where the target is given, the decoder reads it instead of its own output. For a task
with several inputs, a line may also be a JSON object whose fields are columns. Messages
go to stderr, nothing to stdout.

If the input of a model is an image, the weights of each word are drawn on it. If it is
a grid of features, --pictures names the images that they were computed from.
"""

import sys
from collections.abc import Sequence

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line, inside
from transformer_jax.data.examples import parse_record
from transformer_jax.data.photographs import read_photograph
from transformer_jax.errors import UserError
from transformer_jax.predictor import Predictor
from transformer_jax.report.attention import (
    SIDE,
    Sentence,
    with_picture,
    write_report,
)
from transformer_jax.training import processes
from transformer_jax.training.evaluation import AttentionMap

INPUT = flags.DEFINE_string("input", "-", "text file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "report.html", "HTML file to write")
SENTENCES = flags.DEFINE_integer(
    "sentences", 20, "maximum number of input lines to draw", lower_bound=1
)
INSIDE = flags.DEFINE_bool(
    "inside",
    False,
    "also draw gradient × input, and the logit lens of models that have one",
)
PICTURES = flags.DEFINE_string(
    "pictures",
    None,
    "text file with the path of an image for each input line, to draw attention to a "
    "grid of features on",
)


def main(config: ConfigDict) -> None:
    if OUTPUT.value == "-":
        raise UserError(
            "--output=-: the report cannot go to stdout; name a file, e.g. report.html"
        )
    command_line.check_output(OUTPUT.value, INPUT.value, flags.FLAGS.workdir)
    lines = [
        (n, line)
        for n, line in enumerate(command_line.read_lines(INPUT.value), 1)
        if line.strip()
    ]
    if not lines:
        raise UserError(
            f"--input={INPUT.value}: all lines are empty; "
            "give at least one line of text to draw"
        )
    if len(lines) > SENTENCES.value:
        print(
            f"drawing the first {SENTENCES.value} of {len(lines)} lines; "
            "--sentences sets the limit",
            file=sys.stderr,
        )
        lines = lines[: SENTENCES.value]
    pictures = [] if PICTURES.value is None else _pictures([n for n, _ in lines])
    predictor = Predictor(flags.FLAGS.workdir, config)
    columns, needed = predictor.config.columns
    records = [
        parse_record(line, f"input, line {n}", columns, needed, len(columns))
        for n, line in lines
    ]
    maps = predictor.attention(records)
    if pictures:
        maps = _with_pictures(maps, pictures)
    described: list[tuple] = [([], None) for _ in records]
    if INSIDE.value:
        described = [inside.described(predictor, record) for record in records]
    if processes.is_first():
        titles = [
            record if isinstance(record, str) else record[columns[0]]
            for record in records
        ]
        sentences = [
            Sentence(title, [*found, *more], lens)
            for title, found, (more, lens) in zip(titles, maps, described, strict=True)
        ]
        size = write_report(
            OUTPUT.value, f"Attention: {flags.FLAGS.workdir}", sentences
        )
        print(f"wrote {OUTPUT.value}, {size:,} bytes", file=sys.stderr)


def _pictures(numbers: Sequence[int]) -> list[np.ndarray]:
    """Return the images for input lines, which are counted from 1."""
    paths = command_line.read_lines(PICTURES.value, "pictures")
    if len(paths) < numbers[-1]:
        raise UserError(
            f"--pictures={PICTURES.value} has {len(paths)} lines, but the input has "
            f"{numbers[-1]} or more: write the path of an image for each input line"
        )
    size = (SIDE, SIDE)
    return [read_photograph(paths[number - 1], size) for number in numbers]


def _with_pictures(
    maps: Sequence[Sequence[AttentionMap]], pictures: Sequence[np.ndarray]
) -> list[list[AttentionMap]]:
    """Return the maps of each record with a picture of its keys."""
    keys = [i.picture for found in maps for i in found]
    if all(picture is None or picture.pixels is not None for picture in keys):
        raise UserError(
            f"--pictures={PICTURES.value}: this model reads no grids of features to "
            "draw on; leave this option out"
        )
    pairs = zip(maps, pictures, strict=True)
    return [[with_picture(i, pixels) for i in found] for found, pixels in pairs]


if __name__ == "__main__":
    command_line.run_on_workdir(main)
