"""Predicts a line for every line of the input, in order. Messages go to stderr.

With --config.decoding.n_best above 1 a line is {"hypotheses": [{"text", "score", "log_probability"}, ...]}, best first.
"""

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
    if OUTPUT.value != "-":
        command_line.check_output(OUTPUT.value)
    data = sys.stdin.buffer.read() if INPUT.value == "-" else epath.Path(INPUT.value).read_bytes()
    lines = decode_lines(data, "stdin" if INPUT.value == "-" else INPUT.value)
    processes.agree("input", lambda: lines)
    predictor = Predictor(flags.FLAGS.workdir, config)
    text = "".join(line + "\n" for line in predictor.predict(lines, scored=SCORE.value)).encode()
    if not processes.is_first():
        return
    if OUTPUT.value == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    else:
        epath.Path(OUTPUT.value).write_bytes(text)


if __name__ == "__main__":
    command_line.run_on_workdir(main)
