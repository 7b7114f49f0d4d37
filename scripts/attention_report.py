"""Draws what looks at what while a trained model translates: one HTML file that opens without a network.

    python scripts/attention_report.py --workdir=runs/dates --input=lines.txt --output=report.html

A line of the input is a source; with a tab and a text behind it, the decoder reads that in place of its own words.
"""

import sys

from absl import flags
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import command_line
from transformer_jax.data.sources import decode_lines
from transformer_jax.predictor import Predictor
from transformer_jax.report.attention import write_report
from transformer_jax.training import processes

INPUT = flags.DEFINE_string("input", "-", "a file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "report.html", "the file to write")
SENTENCES = flags.DEFINE_integer("sentences", 20, "how many of the input are drawn", lower_bound=1)


def main(config: ConfigDict) -> None:
    command_line.check_output(OUTPUT.value)
    if config.model.architecture == "recurrent" and config.model.attention == "none":
        raise ValueError(f"config.model.attention = 'none' in {flags.FLAGS.workdir}: there is nothing to draw")
    data = sys.stdin.buffer.read() if INPUT.value == "-" else epath.Path(INPUT.value).read_bytes()
    lines = decode_lines(data, "stdin" if INPUT.value == "-" else INPUT.value)
    processes.agree("input", lambda: lines)
    pairs = [line.split("\t", 1) for line in lines if line.strip()]
    if not pairs:
        raise ValueError(f"--input={INPUT.value} holds no line with text: there is nothing to draw")
    if len(pairs) > SENTENCES.value:
        print(f"drawing the first {SENTENCES.value} of {len(pairs)} lines; --sentences draws more", file=sys.stderr)
        pairs = pairs[: SENTENCES.value]
    if "attention_implementation" in config.model:
        config.model.attention_implementation = "einsum"  # the library's keeps its weights to itself
    config.decoding.n_best = 1
    predictor = Predictor(flags.FLAGS.workdir, config)
    sources = [source for source, *_ in pairs]
    own = iter(predictor.predict([source for source, *target in pairs if not target]))
    outputs = [target[0] if target else next(own) for _, *target in pairs]
    sentences = predictor.attention(sources, outputs)
    if processes.is_first():
        size = write_report(OUTPUT.value, f"Attention: {flags.FLAGS.workdir}", sentences)
        print(f"wrote {OUTPUT.value}, {size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    command_line.run_on_workdir(main)
