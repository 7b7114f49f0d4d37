"""Predict one output line for each input line, in order, on stdout or in a file. Messages go to stderr.

    python scripts/predict.py --workdir=runs/dates --input=lines.txt --output=predicted.txt

Predicted text is written as is, any other prediction as a JSON object. With --config.decoding.n_best above 1, the
prediction of a translation model is {"hypotheses": [{"text", "score", "log_probability"}, ...]}, best first.
"""

import json
import sys

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line, files
from transformer_jax.predictor import Predictor
from transformer_jax.training import processes

INPUT = flags.DEFINE_string("input", "-", "text file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "-", "file to write, or - for stdout")
SCORE = flags.DEFINE_bool("score", False, "write JSON objects with text and score, for tasks that predict text")


def main(config: ConfigDict) -> None:
    command_line.check_output(OUTPUT.value, INPUT.value, flags.FLAGS.workdir)
    lines = command_line.read_lines(INPUT.value)
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
        files.write(OUTPUT.value, text)


if __name__ == "__main__":
    command_line.run_on_workdir(main)
