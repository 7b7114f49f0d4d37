"""Draw a trained model's attention weights: one HTML file that opens without a network.

    python scripts/attention_report.py --workdir=runs/dates --input=lines.txt --output=report.html

Each input line is one record. Columns of the task's data may follow, separated by tabs: after source and target, for
example, a decoder reads that target in place of its own output.
"""

import sys

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line
from transformer_jax.predictor import Predictor
from transformer_jax.report.attention import Sentence, write_report
from transformer_jax.training import processes

INPUT = flags.DEFINE_string("input", "-", "a text file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "report.html", "the file to write")
SENTENCES = flags.DEFINE_integer("sentences", 20, "how many of the input are drawn", lower_bound=1)


def main(config: ConfigDict) -> None:
    if OUTPUT.value == "-":
        raise ValueError("--output=-: the report is not written to stdout; name a file")
    command_line.check_output(OUTPUT.value, INPUT.value, flags.FLAGS.workdir)
    lines = [line for line in command_line.read_lines(INPUT.value) if line.strip()]
    if not lines:
        raise ValueError(f"--input={INPUT.value} holds no line with text: there is nothing to draw")
    if len(lines) > SENTENCES.value:
        print(f"drawing the first {SENTENCES.value} of {len(lines)} lines; --sentences draws more", file=sys.stderr)
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
