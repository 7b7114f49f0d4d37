"""Prove on this machine that a recipe's ways of computing the same thing agree: a table of measured differences.

    python scripts/verify.py --config=configs/multi30k.py:en-de

The recipe is shrunk to seconds; no data is needed. Exit code 0: all held; 1: some did not. On a machine with one CPU
device, eight fake ones are made.
"""

import copy
import os
import sys

# Before jax is imported; accelerators are not touched by it.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

from transformer_jax import command_line
from transformer_jax.config import parse
from transformer_jax.verification import verify

CONFIG = command_line.define_recipe()


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    failed, config = 0, CONFIG.value
    checked = copy.deepcopy(config)
    checked.data.directory = checked.data.directory or "(none)"
    parse(checked)  # as it is: shrinking would hide a wrong size
    print(f"{'':<50}{'difference':>12}{'allowed':>10}")
    for row in verify(config):
        failed += not row.held
        difference = "not here" if row.difference is None else f"{row.difference:.2g}"
        print(f"{row.name:<50}{difference:>12}{row.allowed:>10.0e}{'' if row.held else '  DOES NOT HOLD'}", flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    command_line.run(main, distributed=False)
