"""Predicts a line for every line of the input, in order. Messages go to stderr.

With --config.decoding.n_best above 1 a line is {"hypotheses": [{"text", "score", "log_probability"}, ...]}, best first.
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line
from transformer_jax.data.sources import decode_lines
from transformer_jax.predictor import Predictor

INPUT = flags.DEFINE_string("input", "-", "a file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "-", "a file, or - for stdout")
SCORE = flags.DEFINE_bool("score", False, "write JSON objects with text and score")


def main(config: ConfigDict) -> None:
    predictor = Predictor.from_config(flags.FLAGS.workdir, config)
    data = sys.stdin.buffer.read() if INPUT.value == "-" else Path(INPUT.value).read_bytes()
    lines = decode_lines(data, "stdin" if INPUT.value == "-" else INPUT.value)
    predicted = "".join(line + "\n" for line in predictor.predict(lines, scored=SCORE.value))
    if OUTPUT.value == "-":
        sys.stdout.buffer.write(predicted.encode())
    else:
        Path(OUTPUT.value).write_bytes(predicted.encode())


if __name__ == "__main__":
    command_line.run_on_workdir(main)
