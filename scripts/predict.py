"""Predict one output line for every input line, in order. Messages go to stderr.

Text is written as it is, anything else as a JSON object. With --config.decoding.n_best above 1, a translation is
{"hypotheses": [{"text", "score", "log_probability"}, ...]}, best first.
"""

import json
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
SCORE = flags.DEFINE_bool("score", False, "for tasks that predict text: write JSON objects with text and score")


def main(config: ConfigDict) -> None:
    if OUTPUT.value != "-":
        command_line.check_output(OUTPUT.value)
    data = sys.stdin.buffer.read() if INPUT.value == "-" else epath.Path(INPUT.value).read_bytes()
    lines = decode_lines(data, "stdin" if INPUT.value == "-" else INPUT.value)
    processes.agree("input", lambda: lines)
    predictor = Predictor(flags.FLAGS.workdir, config)
    found = predictor.predict(lines, scored=SCORE.value)
    outputs = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in found]
    text = "".join(line.replace("\n", " ") + "\n" for line in outputs).encode()
    if not processes.is_first():
        return
    if OUTPUT.value == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    else:
        epath.Path(OUTPUT.value).write_bytes(text)


if __name__ == "__main__":
    command_line.run_on_workdir(main)
