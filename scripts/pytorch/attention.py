r"""Time attention alone, forward and backward, beside PyTorch's fused kernel.

    python scripts/pytorch/attention.py --length=512 --causal

The number of positions is fixed, so that longer sequences come in smaller batches. Each
implementation of `model.attention_implementation` that runs on this device is timed
with and without dropout on the attention weights. One JSON line an implementation holds
its milliseconds and its temporary memory. PyTorch is left out where it is not
installed.
"""

import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from absl import flags

from transformer_jax import command_line
from transformer_jax.errors import UserError
from transformer_jax.models.attention import attend
from transformer_jax.models.masks import ALL, CAUSAL

LENGTHS = flags.DEFINE_list("length", ["64", "512", "2048"], "lengths of sequences")
POSITIONS = flags.DEFINE_integer("positions", 16_384, "positions in a batch")
HEADS = flags.DEFINE_integer("heads", 16, "number of heads, each 64 wide")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "inputs' type")
IS_CAUSAL = flags.DEFINE_bool("causal", False, "mask later positions")
ROUNDS = flags.DEFINE_integer("rounds", 7, "how often each implementation is timed")
IMPLEMENTATIONS = ("einsum", "blocked", "cudnn")

WIDTH = 64


def of_jax(how: str, length: int, rate: float) -> tuple[Callable[[], None], int]:
    """Return a function that computes once, and the bytes of temporary memory."""
    rows = max(POSITIONS.value // length, 1)
    shape = (3, rows, length, HEADS.value, WIDTH)
    inputs = jax.random.normal(jax.random.key(0), shape, DTYPE.value)
    key = jax.random.key(1) if rate else None
    mask = CAUSAL if IS_CAUSAL.value else ALL

    def total(inputs):
        query, key_, value = inputs
        heads, _ = attend(
            query,
            key_,
            value,
            mask=mask,
            dropout_rate=rate,
            dropout_key=key,
            dtype=DTYPE.value,
            how=how,
        )
        return heads.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(total)).lower(inputs).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(inputs)), memory


def of_pytorch(length: int, rate: float) -> Callable[[], None] | None:
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return None
    rows = max(POSITIONS.value // length, 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (3, rows, HEADS.value, length, WIDTH)
    inputs = torch.randn(shape, device=device, dtype=getattr(torch, DTYPE.value))
    parts = [part.requires_grad_() for part in inputs.unbind()]

    def once() -> None:
        heads = F.scaled_dot_product_attention(
            *parts, dropout_p=rate, is_causal=IS_CAUSAL.value
        )
        gradients = torch.autograd.grad(heads.sum(), parts)
        gradients[0][0, 0, 0, 0].item()  # waits for the device

    return once


def milliseconds(once: Callable[[], None]) -> float:
    once()
    times = []
    for _ in range(ROUNDS.value):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 3)


def main() -> None:
    fixed = {
        "dtype": DTYPE.value,
        "causal": IS_CAUSAL.value,
        "device": jax.devices()[0].device_kind,
    }
    for length in map(int, LENGTHS.value):
        for rate in (0.0, 0.1):
            row = {"length": length, "dropout": rate}
            for how in IMPLEMENTATIONS:
                try:
                    once, memory = of_jax(how, length, rate)
                except UserError as error:
                    print(json.dumps({**row, "how": how, "error": str(error)[:80]}))
                    continue
                values = {"how": how, "ms": milliseconds(once), "bytes": memory}
                print(json.dumps({**row, **values, **fixed}), flush=True)
            once = of_pytorch(length, rate)
            if once:
                values = {"how": "pytorch", "ms": milliseconds(once)}
                print(json.dumps({**row, **values, **fixed}), flush=True)


if __name__ == "__main__":
    command_line.run(main)
