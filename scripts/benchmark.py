"""Times the training step of a recipe on its own data: one JSON line on stdout.

mfu is the share of the matrix-product rate measured in the same run (2048³ on CPU, 8192³ elsewhere; in model.dtype)
that went into useful products: those on tokens, not on padding. On a shared machine compare ratios within one run, not
times across runs.
"""

import itertools
import json
import statistics
import tempfile
import time

import jax
from absl import flags
from ml_collections import config_flags

from transformer_jax import command_line
from transformer_jax.config import parse
from transformer_jax.data.batching import Batch
from transformer_jax.training import processes
from transformer_jax.training.engine import Engine
from transformer_jax.training.profiling import matrix_peak
from transformer_jax.training.sharding import check_rows

CONFIG = config_flags.DEFINE_config_file("config", None, "recipe: configs/NAME.py[:ARG]")
ROUNDS = flags.DEFINE_integer("rounds", 5, "how often every batch shape is timed", lower_bound=1)
flags.mark_flag_as_required("config")


def main() -> None:
    config = parse(CONFIG.value)
    with tempfile.TemporaryDirectory() as workdir:
        task = config.make_task(workdir)
        batches = task.batches(task.train_split, config.training.seed)
        engine = Engine(task, config.engine)
        check_rows((rows for rows, *_ in batches.plan.shapes), engine.mesh, config.training.microbatches)
        state = engine.init(jax.random.key(0))

        def place(batch: Batch) -> dict[str, jax.Array]:
            return engine.place(engine.load(batches, batch), len(batch.indices))

        by_shape: dict[tuple, list] = {}
        for i in range(len(batches.plan)):
            batch = batches.plan.batch(i)
            by_shape.setdefault((len(batch.indices), *batch.shape), []).append(batch)
        # Each shape as often as in an epoch, in proportion to the rarest.
        rarest = min(map(len, by_shape.values()))
        chosen = [b for same in by_shape.values() for b in same[: max(1, len(same) // rarest)]]
        start = time.perf_counter()
        for same in by_shape.values():
            state, _ = jax.block_until_ready(engine.step(state, place(same[0])))
        compile_s = time.perf_counter() - start
        times, data_times, tokens, flops = [], [], 0.0, 0.0
        for batch in itertools.chain.from_iterable([chosen] * ROUNDS.value):
            start = time.perf_counter()
            placed = jax.block_until_ready(place(batch))
            data_times.append(time.perf_counter() - start)
            start = time.perf_counter()
            state, metrics = jax.block_until_ready(engine.step(state, placed))
            times.append(time.perf_counter() - start)
            tokens += float(metrics["weight"])
            flops += task.flops(batches.load(batch))
        peak = matrix_peak(config.model.dtype)
        memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if processes.is_first():
        values = {
            "compile_s": round(compile_s, 2),
            "shapes": len(by_shape),
            "step_ms": round(1000 * statistics.mean(times), 2),
            "data_ms": round(1000 * statistics.mean(data_times), 2),  # in a thread beside the step when training
            "tokens_per_s": round(tokens / sum(times), 1),
            "mfu": round(flops / sum(times) / peak, 4),
            "matrix_gflops": round(peak / 1e9, 1),
            "peak_bytes": memory,
            "device": jax.devices()[0].device_kind,
        }
        print(json.dumps(values))


if __name__ == "__main__":
    command_line.run(main)
