"""Draw a trained model's attention weights in one HTML file that opens in a browser without a network.

    python scripts/attention_report.py --workdir=runs/dates --input=lines.txt --output=report.html

Each input line is one record. A line may hold several tab-separated columns, in the order of the task's data. For
example, a translation model takes a source and a target; where the target is given, the decoder reads it instead of its
own output. Messages go to stderr, nothing to stdout.
"""

import sys

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line
from transformer_jax.predictor import Predictor
from transformer_jax.report.attention import Sentence, write_report
from transformer_jax.training import processes

INPUT = flags.DEFINE_string("input", "-", "text file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "report.html", "HTML file to write")
SENTENCES = flags.DEFINE_integer("sentences", 20, "maximum number of input lines to draw", lower_bound=1)


def main(config: ConfigDict) -> None:
    if OUTPUT.value == "-":
        raise ValueError("--output=-: the report cannot go to stdout; name a file, e.g. report.html")
    command_line.check_output(OUTPUT.value, INPUT.value, flags.FLAGS.workdir)
    lines = [line for line in command_line.read_lines(INPUT.value) if line.strip()]
    if not lines:
        raise ValueError(f"--input={INPUT.value}: all lines are empty; give at least one line of text to draw")
    if len(lines) > SENTENCES.value:
        print(f"drawing the first {SENTENCES.value} of {len(lines)} lines; --sentences sets the limit", file=sys.stderr)
        lines = lines[: SENTENCES.value]
    predictor = Predictor(flags.FLAGS.workdir, config)
    columns = predictor.task.columns
    given = [line.split("\t", len(columns) - 1) for line in lines]
    records = [dict(zip(columns, parts, strict=False)) for parts in given]
    maps = predictor.attention(records)
    if processes.is_first():
        sentences = [Sentence(parts[0], found) for parts, found in zip(given, maps, strict=True)]
        size = write_report(OUTPUT.value, f"Attention: {flags.FLAGS.workdir}", sentences)
        print(f"wrote {OUTPUT.value}, {size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    command_line.run_on_workdir(main)
