"""Trains a recipe in a workdir, or goes on where an earlier run of it stopped.

After SIGTERM it saves, and ends with exit code 75: the same command goes on.
"""

import sys

from absl import flags
from ml_collections import config_flags

from transformer_jax import command_line
from transformer_jax.config import claim_workdir, parse
from transformer_jax.training.loop import Preempted, train

CONFIG = config_flags.DEFINE_config_file("config", None, "recipe: configs/NAME.py[:ARG]")
WORKDIR = flags.DEFINE_string("workdir", None, "folder for config, tokenizers, checkpoints, metrics", required=True)
EXIT_RUN_AGAIN = 75  # EX_TEMPFAIL of sysexits.h

flags.mark_flag_as_required("config")


def main() -> None:
    config = parse(CONFIG.value)
    claim_workdir(WORKDIR.value, CONFIG.value)
    try:
        train(config.make_task(WORKDIR.value), config.engine, WORKDIR.value)
    except Preempted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(EXIT_RUN_AGAIN)


if __name__ == "__main__":
    command_line.run(main)
