"""Check on this machine that different ways of computing the same thing agree.

    python scripts/verify.py --config=configs/multi30k.py:en-de

The output is a table of differences. The recipe is shrunk so that it runs in seconds,
without data. With --export, what scripts/export.py writes is compared, too. The exit
code is 0 if every difference is within its tolerance, and 1 otherwise. On a machine
with a single CPU device, JAX simulates eight.
"""

import copy
import itertools
import os
import sys

# Must be set before jax is imported. It has no effect on accelerators.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
from absl import flags

from transformer_jax import command_line
from transformer_jax.config import parse
from transformer_jax.models.attention import dot_product_attention
from transformer_jax.models.kernels.checks import compare_kernels
from transformer_jax.verification import Row, verify

CONFIG = command_line.define_recipe()
EXPORT = flags.DEFINE_bool(
    "export", False, "also compare the programs that scripts/export.py writes"
)


def main() -> None:
    command_line.check_output("-")
    jax.config.update("jax_default_matmul_precision", "highest")
    failed = 0
    config = CONFIG.value
    checked = copy.deepcopy(config)
    checked.data.directory = checked.data.directory or "(none)"
    parse(checked)  # check the original sizes: shrinking would hide an invalid one
    print(f"{'':<50}{'difference':>12}{'allowed':>10}")
    for row in itertools.chain(
        map(Row._make, compare_kernels(config.model, dot_product_attention)),
        verify(config, EXPORT.value),
    ):
        failed += not row.held
        difference = "not run" if row.difference is None else f"{row.difference:.2g}"
        print(
            f"{row.name:<50}{difference:>12}{row.allowed:>10.0e}"
            f"{'' if row.held else '  FAILED'}",
            flush=True,
        )
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    command_line.run(main, distributed=False)
