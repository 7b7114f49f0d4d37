r"""Score a trained run on one split, and print the scores as one JSON line.

    python scripts/evaluate.py --workdir=runs/dates --split=validation \
        --config.decoding.beam_size=4

The line has the step, parameters_sha256, the number of examples and the task's metrics.
"""

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line
from transformer_jax.errors import UserError
from transformer_jax.predictor import Predictor
from transformer_jax.training import processes
from transformer_jax.training.logging import json_line

SPLIT = flags.DEFINE_string(
    "split",
    None,
    "file name without suffix, or tfds split (default: config.data.test_split)",
)


def main(config: ConfigDict) -> None:
    command_line.check_output("-")
    if SPLIT.value == "":
        raise UserError("--split is empty: name a split, or omit the flag")
    predictor = Predictor(flags.FLAGS.workdir, config)
    scores = predictor.evaluate(SPLIT.value)
    if processes.is_first():
        print(json_line(scores))


if __name__ == "__main__":
    command_line.run_on_workdir(main)
