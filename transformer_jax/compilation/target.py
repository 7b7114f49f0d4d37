"""Compile a step for TPUs or GPUs that are not at hand, and describe the program:
whether it fits and what it needs.
"""

import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax

from transformer_jax.compilation.chips import Chip
from transformer_jax.compilation.collectives import Collective, read_collectives
from transformer_jax.compilation.hlo import parse
from transformer_jax.compilation.step_time import StepTime, read_step_time
from transformer_jax.data.batching import Arrays
from transformer_jax.errors import UserError
from transformer_jax.training.engine import Engine
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.freezing import size, trained_size
from transformer_jax.training.initialization import bytes_per_device
from transformer_jax.training.sharding import abstract_batch

STEPS = ("train", "evaluate", "predict")
GIB = 2**30


class DoesNotFit(UserError):
    """Raised for a program that needs more memory than the device has."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A compiled step. Bytes are per device, as the compiler of the device counts them.

    held: parameters, optimizer state and batch.
    temporary: gradients, activations and all other buffers.
    code: the program.
    memory: what a program can use on the device.
    """

    topology: str
    mesh: dict[str, int]
    step: str
    parameters: int
    trained: int
    batch: dict[str, tuple[int, ...]]
    tokens: int
    flops: float  # of a training step on the whole batch; 0 for other steps
    held: int
    temporary: int
    code: int
    memory: int
    compile_s: float
    step_time: StepTime
    collectives: list[Collective]
    turns: int  # assumed for loops of unknown length

    @property
    def used(self) -> int:
        """Bytes that a device needs in all."""
        return self.held + self.temporary + self.code


def lower(engine: Engine, batch: Arrays, step: str) -> jax.stages.Lowered:
    """Return the step, not yet compiled, for the devices of the engine's mesh.

    step: "train"; "evaluate", an evaluation during training; or "predict", for which
        the references of the batch are left out. Where predictions grow in pieces,
        "predict" is the program that adds a piece.
    """
    mesh = engine.mesh
    params = engine.abstract_parameters
    evaluator = Evaluator(engine.task, mesh)
    match step:
        case "train":
            return engine.step.lower(engine.abstract_state, abstract_batch(batch, mesh))
        case "evaluate":
            return evaluator.lower(params, abstract_batch(batch, mesh), greedy=True)
        case "predict":
            names = engine.task.dummy_batch(1, 2, references=False)
            inputs = abstract_batch({name: batch[name] for name in names}, mesh)
            return evaluator.lower(params, inputs, greedy=False)
    raise UserError(f"step = {step!r}: must be one of {', '.join(STEPS)}")


def compile_for(
    topology: str, chip: Chip, engine: Engine, batch: Arrays, step: str, turns: int
) -> tuple[Target, str]:
    """Return the description of the compiled step, and its text.

    Loops of unknown length count as `turns` iterations.

    Raises:
        DoesNotFit: The step needs more memory than the device has.
    """
    state = engine.abstract_state if step == "train" else engine.abstract_parameters

    def does_not_fit(size: float) -> DoesNotFit:
        return DoesNotFit(
            too_large(size, topology, chip, bytes_per_device(state), step)
        )

    start = time.perf_counter()
    lowered = lower(engine, batch, step)
    try:
        compiled = lowered.compile(dict(chip.options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise does_not_fit(largest_size(str(error))) from error
    took = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    work = engine.task.work(batch)
    text = compiled.as_text() or ""
    target = Target(
        topology=topology,
        mesh=dict(engine.mesh.shape),
        step=step,
        parameters=size(engine.abstract_parameters),
        trained=trained_size(engine.abstract_state.params, engine.config.frozen),
        batch={name: array.shape for name, array in batch.items()},
        tokens=work.tokens,
        flops=work.flops if step == "train" else 0.0,
        held=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        memory=int(chip.memory),
        compile_s=took,
        step_time=read_step_time(parse(text), chip, turns),
        collectives=read_collectives(text, turns)[0],
        turns=turns,
    )
    # which the compiler of GPUs does not check
    if chip.specification and target.used > chip.memory:
        raise does_not_fit(target.used)
    return target, text


def largest_size(error: str) -> float:
    """Return the bytes of the largest size in a message of the compiler, e.g. "Used
    38.30G of 15.75G hbm", or 0.
    """
    return max(
        (
            float(number) * {"M": 2**20, "G": GIB, "T": 2**40}[unit]
            for number, unit in _SIZE.findall(error)
        ),
        default=0,
    )


def too_large(size: float, topology: str, chip: Chip, held: int, step: str) -> str:
    """Return the message for a step that needs `size` bytes, or an unknown number of
    bytes if `size` is smaller than the memory. `held` is the size of the state.
    """
    memory = chip.memory
    over = size - memory
    by = f"by {over / GIB:.2f} GiB" if over > 0 else "on the device"
    if held > memory / 2:
        remedy = (
            "a larger fsdp or tensor in --mesh, "
            "which divide parameters and optimizer state among more devices"
        )
    elif step == "train":
        remedy = (
            "a larger training.microbatches, a smaller data.batch_tokens, "
            "model.remat, or a larger topology"
        )
    else:
        remedy = "a smaller evaluation.batch_size, or a larger topology"
    return (
        f"--topology={topology}: the step does not fit {by}: "
        f"a device has {memory / GIB:.2f} GiB, "
        f"and the state alone takes {held / GIB:.2f} GiB. What helps: {remedy}"
    )


_SIZE = re.compile(r"([\d.]+)([MGT])\b")


def table_rows(target: Target, chip: Chip, link: float) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs to display.

    `link` is the rate in bytes/s at which a device sends.
    """
    t = target
    devices = math.prod(target.mesh.values())

    def time(estimate: float | None, bound: float) -> str:
        least = f"at least {1000 * bound:.1f} ms"
        return least if estimate is None else f"{1000 * estimate:.1f} ms, {least}"

    yield (
        "compiled for",
        (
            f"{t.topology}, "
            f"mesh {' × '.join(f'{axis} {size}' for axis, size in t.mesh.items())}"
        ),
    )
    yield "step", t.step
    yield "parameters", f"{t.parameters:,}"
    if t.trained != t.parameters:
        yield "  trained", f"{t.trained:,} ({t.trained / t.parameters:.2%})"
    yield "batch", ", ".join(f"{name} {shape}" for name, shape in t.batch.items())
    if t.flops:
        yield "tokens per step", f"{t.tokens:,}"
        yield "FLOPs per step", f"{t.flops:.3g}, {t.flops / devices:.3g} per device"
    yield (
        "fits",
        (
            f"yes: {t.used / GIB:.2f} of {t.memory / GIB:.2f} "
            f"GiB per device ({t.used / t.memory:.0%})"
        ),
    )
    yield "bytes per device: state and batch", f"{t.held:,}"
    yield "  temporary", f"{t.temporary:,}"
    yield "  program", f"{t.code:,}"
    for c in t.collectives:
        yield (
            f"{c.kind} among {c.group} devices",
            (
                f"{c.count:,} per step, {c.overlapped:,} of them during computations; "
                f"{c.bytes:,} bytes in total, {c.sent:,} bytes sent per device"
            ),
        )
    sending = sum(c.sent for c in t.collectives) / link
    meanwhile = sum(c.meanwhile for c in t.collectives) / link
    if t.collectives:
        name = f"communication at {link / 1e9:g} GB/s (estimate)"
        yield (
            name,
            (
                f"{1000 * sending:.3g} ms, "
                f"{1000 * meanwhile:.3g} ms of it during computations"
            ),
        )
    without = "; the compiler gives no estimate" if t.step_time.estimate is None else ""
    yield (
        "time without communication (estimate)",
        time(t.step_time.estimate, t.step_time.bound) + without,
    )
    for part, step_time in t.step_time.parts.items():
        yield f"  {part}", time(step_time.estimate, step_time.bound)
    if t.flops:
        ideal = t.flops / devices / chip.peak
        mfu = ""
        if t.step_time.estimate is not None:
            mfu = f"{ideal / t.step_time.estimate:.1%}, "
        yield (
            "MFU these times would mean (estimate)",
            f"{mfu}at most {ideal / t.step_time.bound:.1%}",
        )
    if t.collectives:
        alone = sending - meanwhile
        estimate = None
        if t.step_time.estimate is not None:
            estimate = t.step_time.estimate + alone
        yield (
            "time with communication (estimate)",
            time(estimate, t.step_time.bound + alone),
        )
    if t.step_time.guessed:
        yield (
            "loops of unknown length",
            f"{t.step_time.guessed}, counted as {t.turns} iterations each",
        )
    yield "compile time", f"{t.compile_s:.0f} s"
