"""Predicts a line for every line of the input, in order. Messages go to stderr.

With --config.decoding.n_best above 1 a line is {"hypotheses": [{"text", "score", "log_probability"}, ...]}, best first.
"""

import os
import sys

from absl import flags
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import command_line
from transformer_jax.data.sources import decode_lines
from transformer_jax.predictor import Predictor
from transformer_jax.training import processes

INPUT = flags.DEFINE_string("input", "-", "a file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "-", "a file, or - for stdout")
SCORE = flags.DEFINE_bool("score", False, "write JSON objects with text and score")


def main(config: ConfigDict) -> None:
    data = sys.stdin.buffer.read() if INPUT.value == "-" else epath.Path(INPUT.value).read_bytes()
    lines = decode_lines(data, "stdin" if INPUT.value == "-" else INPUT.value)
    processes.agree("input", lambda: lines)
    predictor = Predictor(flags.FLAGS.workdir, config)
    path = OUTPUT.value if processes.is_first() else os.devnull
    with sys.stdout.buffer if path == "-" else epath.Path(path).open("wb") as output:
        for line in predictor.predict(lines, scored=SCORE.value):
            output.write(line.encode() + b"\n")


if __name__ == "__main__":
    command_line.run_on_workdir(main)
