"""Time a recipe's training step on its own data, and print the result as one JSON line.

    python scripts/benchmark.py --config=configs/multi30k.py:en-de,quick --config.data.directory=DIR

`mfu` (model FLOPs utilization) is the fraction of the chip's published peak FLOP/s that is spent on matrix products
over tokens; products over padding do not count. On CPUs and unknown chips the line has `matmul_utilization` instead,
the fraction of a matrix-product rate that is measured in the same run. On a shared machine, compare ratios within one
run and not times across runs.
"""

import itertools
import json
import statistics
import tempfile
import time

import jax
from absl import flags

from transformer_jax import command_line
from transformer_jax.config import make_task, parse
from transformer_jax.data.batching import Batch
from transformer_jax.training import processes
from transformer_jax.training.engine import Engine
from transformer_jax.training.profiling import peak_flops
from transformer_jax.training.sharding import Fed, check_rows, feed

CONFIG = command_line.define_recipe()
ROUNDS = flags.DEFINE_integer("rounds", 5, "how many times to time each batch shape", lower_bound=1, upper_bound=10_000)


def main() -> None:
    config = parse(CONFIG.value)
    with tempfile.TemporaryDirectory() as workdir:
        task = make_task(config, workdir)
        batches = task.batches(config.data.train_split, config.training.seed)
        engine = Engine(task)
        check_rows((rows for rows, *_ in batches.plan.shapes), engine.mesh, config.training.microbatches)
        state = engine.init(jax.random.key(0))

        def load(batch: Batch) -> Fed:
            return next(feed(batches, [batch.number], engine.mesh))

        by_shape: dict[tuple, list] = {}
        for i in range(len(batches.plan)):
            batch = batches.plan.batch(i)
            by_shape.setdefault((len(batch.indices), *batch.shape), []).append(batch)
        # The rarest shape is timed once per round, the others in proportion to their frequency in an epoch.
        rarest = min(map(len, by_shape.values()))
        chosen = [b for same in by_shape.values() for b in same[: max(1, len(same) // rarest)]]
        start = time.perf_counter()
        for same in by_shape.values():
            state, _ = jax.block_until_ready(engine.step(state, load(same[0]).placed))
        compile_s = time.perf_counter() - start
        times, data_times, tokens, flops = [], [], 0.0, 0.0
        for batch in itertools.chain.from_iterable([chosen] * ROUNDS.value):
            start = time.perf_counter()
            fed = load(batch)
            jax.block_until_ready(fed.placed)
            data_times.append(time.perf_counter() - start)
            start = time.perf_counter()
            state, _ = jax.block_until_ready(engine.step(state, fed.placed))
            times.append(time.perf_counter() - start)
            work = task.work(batches.load(batch))
            tokens, flops = tokens + work.tokens, flops + work.flops
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


if __name__ == "__main__":
    command_line.run(main)
