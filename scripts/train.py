"""Trains a recipe in a workdir, or goes on where an earlier run of it stopped."""

from absl import flags
from ml_collections import config_flags

from transformer_jax import command_line
from transformer_jax.config import claim_workdir, parse
from transformer_jax.training.loop import train

CONFIG = config_flags.DEFINE_config_file("config", None, "recipe: configs/NAME.py[:ARG]")
WORKDIR = flags.DEFINE_string("workdir", None, "folder for config, tokenizers, checkpoints, metrics", required=True)
flags.mark_flag_as_required("config")


def main() -> None:
    config = parse(CONFIG.value)
    claim_workdir(WORKDIR.value, CONFIG.value)
    train(config.make_task(WORKDIR.value), config.engine, WORKDIR.value)


if __name__ == "__main__":
    command_line.run(main)
