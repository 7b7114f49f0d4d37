r"""Time a recipe's training step, and print the result as one JSON line.

    python scripts/benchmark.py --config=configs/multi30k.py:en-de,quick \
        --config.data.directory=DIR
    python scripts/benchmark.py --config=configs/wmt14.py:big --length=64

The step is timed on the recipe's data or, with --length and without data, on random
examples of this length, without padding.

`mfu` (model FLOPs utilization) is the fraction of the chip's published peak FLOP/s that
is spent on matrix products over tokens; products over padding do not count. On CPUs and
unknown chips the line has `matmul_utilization` instead, the fraction of a
matrix-product rate that is measured in the same run. On a shared machine, compare
ratios within one run and not times across runs.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from absl import flags

from transformer_jax import command_line
from transformer_jax.config import make_task, parse
from transformer_jax.data.batching import Arrays, Batch
from transformer_jax.training import processes
from transformer_jax.training.engine import Engine
from transformer_jax.training.profiling import peak_flops
from transformer_jax.training.sharding import (
    batch_sharding,
    check_rows,
    feed,
    place,
    row_shards,
    rows_here,
)

CONFIG = command_line.define_recipe()
ROUNDS = flags.DEFINE_integer(
    "rounds",
    5,
    "how many times to time each batch shape",
    lower_bound=1,
    upper_bound=10_000,
)
LENGTH = flags.DEFINE_integer(
    "length",
    None,
    "time random examples of this length instead of the data",
    lower_bound=2,
)


class Timed(NamedTuple):
    """A batch to time the step on.

    place: loads the rows of this process and places them on the mesh.
    load: returns all rows.
    """

    place: Callable[[], dict[str, jax.Array]]
    load: Callable[[], Arrays]


def main() -> None:
    command_line.check_output("-")
    raw = CONFIG.value
    if LENGTH.value:
        raw.data.directory = raw.data.directory or "(none)"
    config = parse(raw)
    with tempfile.TemporaryDirectory() as workdir:
        engine = Engine(make_task(config, None if LENGTH.value else workdir))
        by_shape = (
            [[random_batch(engine, LENGTH.value)]]
            if LENGTH.value
            else batches_of_data(engine)
        )
        state = engine.init(jax.random.key(0))
        # The rarest shape is timed once per round, the others in proportion to their
        # frequency in an epoch.
        rarest = min(map(len, by_shape))
        chosen = [
            batch for same in by_shape for batch in same[: max(1, len(same) // rarest)]
        ]
        start = time.perf_counter()
        for same in by_shape:
            state, _ = jax.block_until_ready(engine.step(state, same[0].place()))
        compile_s = time.perf_counter() - start
        times = []
        data_times = []
        tokens = 0.0
        flops = 0.0
        for batch in itertools.chain.from_iterable([chosen] * ROUNDS.value):
            start = time.perf_counter()
            placed = jax.block_until_ready(batch.place())
            data_times.append(time.perf_counter() - start)
            start = time.perf_counter()
            state, _ = jax.block_until_ready(engine.step(state, placed))
            times.append(time.perf_counter() - start)
            work = engine.task.work(batch.load())
            tokens = tokens + work.tokens
            flops = flops + work.flops
        utilization, peak = peak_flops(config.model.dtype)
        memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if processes.is_first():
        values = {
            "compile_s": round(compile_s, 2),
            "shapes": len(by_shape),
            "step_ms": round(1000 * statistics.mean(times), 2),
            # In training, a thread loads data while the step runs.
            "data_ms": round(1000 * statistics.mean(data_times), 2),
            "tokens_per_s": round(tokens / sum(times), 1),
            utilization: round(flops / sum(times) / peak, 4),
            "peak_gflops": round(peak / 1e9, 1),
            "peak_bytes": memory,
            "device": jax.devices()[0].device_kind,
        }
        print(json.dumps(values))


def batches_of_data(engine: Engine) -> list[list[Timed]]:
    """Return the batches of an epoch, those of each shape in a list of their own."""
    config = engine.task.config
    batches = engine.task.batches(config.data.train_split, config.training.seed)
    check_rows(
        (rows for rows, *_ in batches.plan.shapes),
        engine.mesh,
        config.training.microbatches,
    )

    def timed(batch: Batch) -> Timed:
        return Timed(
            lambda: next(feed(batches, [batch.number], engine.mesh)).placed,
            lambda: batches.load(batch),
        )

    by_shape: dict[tuple, list[Timed]] = {}
    for i in range(len(batches.plan)):
        batch = batches.plan.batch(i)
        by_shape.setdefault((len(batch.indices), *batch.shape), []).append(timed(batch))
    return list(by_shape.values())


def random_batch(engine: Engine, length: int) -> Timed:
    """Return a batch of data.batch_tokens random positions in examples of `length`."""
    config = engine.task.config
    mesh = engine.mesh
    command_line.check_length(length, *config.longest)
    parts = row_shards(mesh.shape) * config.training.microbatches
    rows = max(config.data.batch_tokens // length // parts, 1) * parts
    arrays = engine.task.dummy_batch(rows, length)
    here = rows_here(batch_sharding(mesh), rows)
    held = {name: array[here] for name, array in arrays.items()}
    return Timed(lambda: place(held, mesh, rows, here.start), lambda: arrays)


if __name__ == "__main__":
    command_line.run(main)
