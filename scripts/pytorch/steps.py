r"""Time a recipe's training step beside the same model in PyTorch.

    python scripts/pytorch/steps.py --config=configs/wmt14.py:big --length=64

Both sides get random examples of one length without padding, compute matrix products in
`model.dtype`, and take turns on one device, so that their ratio does not depend on what
else the machine does. One JSON line holds the medians over the rounds, and the ratio
(2 means that the step here is twice as fast) with its range.

`--compile` uses `torch.compile` on PyTorch's side. Needs PyTorch.
"""

import functools
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch
from absl import flags
from turns import compare

import models
from transformer_jax import command_line
from transformer_jax.config import make_task, parse, shrink
from transformer_jax.training.engine import Engine
from transformer_jax.training.sharding import place

CONFIG = command_line.define_recipe()
LENGTH = flags.DEFINE_integer("length", 128, "tokens of an example", lower_bound=2)
ROUNDS = flags.DEFINE_integer("rounds", 6, "how often each side has its turn")
STEPS = flags.DEFINE_integer("steps", 20, "steps of a turn", lower_bound=1)
COMPILE = flags.DEFINE_bool("compile", False, "use torch.compile")
SMALL = flags.DEFINE_bool("small", False, "shrink the model, to try the command")

Turn = Callable[[int], float]


def here(config, rows: int, length: int) -> Turn:
    """Return a function that runs steps, and returns the seconds that each took."""
    engine = Engine(make_task(config, None))
    state = engine.init(jax.random.key(0))
    batch = place(engine.task.dummy_batch(rows, length), engine.mesh, rows, 0)

    def turn(steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = engine.step(state, batch)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / steps

    return turn


def pytorch(config, rows: int, length: int, device: str) -> Turn:
    """The same for PyTorch."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = models.build(config, length).to(device).train()
    size = model.table.shape[0]
    ids = torch.randint(size, (rows, length), device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    compute = torch.compile(model) if COMPILE.value else model
    has_autocast = config.model.dtype == "bfloat16"

    def turn(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=has_autocast):
                loss = compute(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        return (time.perf_counter() - start) / steps

    return turn


def main() -> None:
    raw = CONFIG.value
    raw.data.directory = raw.data.directory or "(none)"
    if SMALL.value:
        shrink(raw)
    config = parse(raw)
    length = LENGTH.value
    command_line.check_length(length, *config.longest)
    rows = max(config.data.batch_tokens // length, 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = here(config, rows, length)
    theirs = pytorch(config, rows, length, device)
    for turn in (ours, theirs):
        turn(2)
    seconds, seconds_there, ratio = compare(
        functools.partial(ours, STEPS.value),
        functools.partial(theirs, STEPS.value),
        ROUNDS.value,
    )
    line = {
        "rows": rows,
        "length": length,
        "here_ms": round(1000 * seconds, 2),
        "pytorch_ms": round(1000 * seconds_there, 2),
        **ratio,
        "dtype": config.model.dtype,
        "compile": COMPILE.value,
        "torch": torch.__version__,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    command_line.run(main)
