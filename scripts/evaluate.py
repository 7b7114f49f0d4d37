"""Score a run on a split: one JSON line on stdout.

    python scripts/evaluate.py --workdir=runs/dates --split=validation --config.decoding.beam_size=4

The line has the step, parameters_sha256, the number of examples and the metrics of the task.
"""

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line
from transformer_jax.predictor import Predictor
from transformer_jax.training import processes
from transformer_jax.training.logging import json_line

SPLIT = flags.DEFINE_string("split", None, "a file's stem or a tfds split; by default config.data.test_split")


def main(config: ConfigDict) -> None:
    if SPLIT.value == "":
        raise ValueError("--split= is empty: name a split, or leave the option out")
    predictor = Predictor(flags.FLAGS.workdir, config)
    scores = predictor.evaluate(SPLIT.value)
    if processes.is_first():
        print(json_line(scores))


if __name__ == "__main__":
    command_line.run_on_workdir(main)
