"""The time of a program for TPUs or GPUs: the compiler's own estimate, and a lower
bound, by part of the model.

The scheduled program for TPUs carries `estimated_cycles` for most instructions. Their
sum is the estimate. It is about right for matrix products and up to six times too high
for operations that are limited by memory. The lower bound therefore takes only products
at the estimate, and all other operations at the bandwidth of the device's memory. The
compiler has no estimate for kernels. Those of attention count in both times, with their
products at the device's peak. In the estimate, those of `kernels.short` take the cycles
of CYCLES instead, which is more.
For GPUs there is only the bound, with products at the device's peak. It can be too high
there, because it counts what an instruction finds in the L2 cache as if it came from
memory. Neither time has communication, sorting, or other kernels that are custom calls.
"""

import collections
import dataclasses
import math
import re

from transformer_jax.compilation.chips import Chip
from transformer_jax.compilation.hlo import (
    Computation,
    Instruction,
    Program,
    arrays,
    bytes_of,
    cycles_of,
)

# The part of the model that an instruction belongs to: the first pattern found in its
# op_name. "buffers" are those in which a loop over layers keeps its results, and
# whatever the compiler added itself, whose op_name is not a path.
PARTS = {
    "buffers": (
        r"^[^/]*$|dynamic_(update_)?index_in_dim|while/body/dynamic_(update_)?slice"
    ),
    "norm and residual": r"norm|residual(?!s)",
    "attention": r"attention",
    "feed-forward": r"feed.forward",
    "embedding": r"embed",
    "loss": r"^jit\(train_step\)/(transpose\()?jvp\((jit\(\w+\))?\)",
    "optimizer": r"^jit\(train_step\)/(?!.*jvp\()",
}
OTHER = "other"
UPDATES = {
    "dynamic-update-slice": 1,
    "scatter": 2,
}  # instructions that change a part of an array, and which operand it is


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds per step: the compiler's estimate, None if it gives none, and the
    lower bound.
    """

    estimate: float | None
    bound: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The times of a step.

    parts: by part of the model, longest first.
    flops: of the matrix products that the program computes, per device.
    memory_s: the time for all bytes that are read from and written to main memory, also
        in the background.
    guessed: the number of loops with an unknown trip count.
    """

    parts: dict[str, Time]
    flops: int
    memory_s: float
    guessed: int

    @property
    def estimate(self) -> float | None:
        """The sum of the compiler's estimates in seconds, None if a part has none."""
        estimates = [
            time.estimate for time in self.parts.values() if time.estimate is not None
        ]
        return sum(estimates) if len(estimates) == len(self.parts) else None

    @property
    def bound(self) -> float:
        """The least time in seconds that products or memory allow."""
        return max(sum(time.bound for time in self.parts.values()), self.memory_s)


def read_step_time(program: Program, chip: Chip, turns: int = 1) -> StepTime:
    """Return the times of a program.

    Loops of unknown length count as `turns` iterations.
    """
    estimate: dict[str, float] = collections.defaultdict(float)
    bound: dict[str, float] = collections.defaultdict(float)
    flops = moved = guessed = 0
    for instruction, computation, times in program.walk(turns):
        guessed += instruction.kind == "while" and program.trips(instruction) is None
        if instruction.kind in ("copy-start", "slice-start"):
            moved += times * _moved(instruction)
        elif products := kernel_flops(instruction):
            size = _bytes(program, instruction, computation)
            part = part_of(instruction.op_name)
            least = max(products / chip.peak, size / chip.bandwidth)
            bound[part] += times * least
            cycles = chip.kernel_slowness * kernel_cycles(instruction)
            estimate[part] += times * max(least, cycles / (chip.clock or math.inf))
            flops = flops + times * products
            moved = moved + times * size
        elif program.computes(instruction):
            products = _flops(program, instruction, computation)
            size = _bytes(program, instruction, computation)
            part = part_of(instruction.op_name)
            moving = size / chip.bandwidth
            if chip.clock:
                taken = cycles_of(instruction) / chip.clock
                estimate[part] += times * taken
                bound[part] += times * (taken if products else moving)
            else:
                bound[part] += times * max(products / chip.peak, moving)
            flops = flops + times * products
            moved = moved + times * size
    longest = sorted(bound, key=lambda part: -(estimate or bound)[part])
    parts = {part: Time(estimate.get(part), bound[part]) for part in longest}
    return StepTime(parts, flops, moved / chip.bandwidth, guessed)


def part_of(op_name: str) -> str:
    """Return the part of the model that an instruction with this op_name belongs to."""
    return next(
        (part for part, pattern in PARTS.items() if re.search(pattern, op_name)), OTHER
    )


def _moved(instruction: Instruction) -> int:
    """Return the bytes that a copy in the background reads from and writes to main
    memory.
    """
    first, second, *_ = arrays(instruction.shape)
    return min(first[1], second[1]) * (first[2] + second[2])


def _flops(program: Program, instruction: Instruction, computation: Computation) -> int:
    """Return the FLOPs of the matrix products in an instruction.

    TPU programs write all of them as convolutions, GPU programs as dots or calls of
    cuBLAS.
    """
    if instruction.kind == "fusion":
        fused = program.computations[instruction.called[0]]
        return sum(_flops(program, x, fused) for x in fused.values())
    if instruction.kind == "dot" or 'custom_call_target="__cublas$' in instruction.text:
        return product_flops(instruction, computation[instruction.operands[0]].shape)
    if instruction.kind != "convolution":
        return 0
    return convolution_flops(
        instruction, *(computation[name].shape for name in instruction.operands[:2])
    )


# The products of splash attention's kernels, as (those along H, those along H'):
# scores, output · scores, dP, dQ · scores, dP, dK, dV.
KERNELS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}


# The cycles of our kernels for each 1,024 scores that they compute, as many as fit a
# register, are a + b / S, with S keys in a block. (a, b) are fitted to libtpu's static
# profile of the kernel alone for v5e (the option
# `--xla_jf_dump_static_llo_profile_to`), with S = 128, 512 and 1,024 and 16 heads of 64
# in bfloat16.
CYCLES = {
    "short_forward": (4.9, 330),
    "short_backward": (12.8, 30),
    "short_forward_dropout": (11.2, 0),
    "short_backward_dropout": (17.7, 0),
}
_COST = re.compile(r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"(\d+)"')
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}")


def kernel_cycles(instruction: Instruction) -> float:
    """Return the estimated cycles of a kernel of `kernels.short` on a v5e, or 0 for
    another instruction.

    The second operand has the keys of a block as its last axis.
    """
    name = re.search(
        r"\b(short_(?:forward|backward)(?:_dropout)?)\b", instruction.op_name
    )
    cost = _COST.search(instruction.text)
    operands = _OPERANDS.search(instruction.text)
    if not (name and cost and operands):
        return 0
    each, per_block = CYCLES[name[1]]
    return (each + per_block / arrays(operands[1])[1][0][-1]) * int(cost[2]) / 1024


def kernel_flops(instruction: Instruction) -> int:
    """Return the FLOPs of the matrix products of a kernel of attention, or 0 for
    another instruction.

    Kernels of `kernels.short` state them. Those of splash attention do not. Their first
    operands of rank 4 are queries (B, N, T, H), keys (B, K, S, H) and values (B, K, S,
    H'). The last two axes are swapped if the layout is 2. If the mask is causal, the
    first operand (1, n, n) lists the n × n blocks of scores, of which those above the
    diagonal are skipped.
    """
    if kernel_cycles(instruction) and (cost := _COST.search(instruction.text)):
        return int(cost[1])
    kernel = re.search(r"/splash_mha_(\w+?)_[^/]*/pallas_call", instruction.op_name)
    operands = _OPERANDS.search(instruction.text)
    if instruction.kind != "custom-call" or not kernel or not operands:
        return 0
    sizes = [size for size, _, _ in arrays(operands[1])]
    tensors = []
    for name, size in zip("qkv", [x for x in sizes if len(x) == 4], strict=False):
        layout = re.search(rf'{name}_layout\\": (\d)', instruction.text)
        if layout and layout[1] == "2":
            first, second, third, fourth = size
            size = [first, second, fourth, third]
        tensors.append(size)
    (batch, heads, length, width), (_, _, key_length, _), (*_, value_width) = tensors
    along, across = KERNELS[kernel[1]]
    flops = (
        2 * batch * heads * length * key_length * (along * width + across * value_width)
    )
    blocks = sizes[0][1] if len(sizes[0]) == 3 else 0
    return flops * (blocks + 1) // (2 * blocks) if blocks else flops


def convolution_flops(instruction: Instruction, left: str, right: str) -> int:
    """Return 2 × the number of multiplications of a convolution whose operands have
    these shapes.

    Products with a batch axis are convolutions with padding and dilation. Products with
    padding do not count.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    if not labels:
        raise ValueError(
            "a convolution without dim_labels in XLA's output: "
            f"{instruction.text.strip()[:300]}"
        )
    sizes = [arrays(shape)[0][0] for shape in (left, right, instruction.shape)]
    a, b, out = (
        dict(zip(axes, size, strict=True))
        for axes, size in zip(labels.groups(), sizes, strict=True)
    )
    window = (re.search(r"window=\{(.*?)\}", instruction.text) or ["", ""])[1]
    axes = sorted(axis for axis in out if axis.isdecimal())

    def values(key: str, default: str) -> list[int]:
        """Return a number of the window for each of the axes.

        Of padding, only that before the values is returned.
        """
        given = re.search(rf"\b{key}([\dx_\-]+)", window)
        texts = given[1].split("x") if given else [default] * len(axes)
        return [int(text.split("_")[0]) for text in texts]

    pairs = 1
    for axis, width, stride, before, spread, step in zip(
        axes,
        values("size=", "1"),
        values("stride=", "1"),
        values("pad=", "0"),
        values("lhs_dilate=", "1"),
        values("rhs_dilate=", "1"),
        strict=True,
    ):
        length = (a[axis] - 1) * spread + 1
        positions = (
            o * stride + k * step - before
            for o in range(out[axis])
            for k in range(width)
        )
        pairs *= sum(0 <= x < length and x % spread == 0 for x in positions)
    return 2 * out["b"] * out["f"] * b["i"] * pairs


def product_flops(instruction: Instruction, left: str) -> int:
    """Return 2 × the number of multiplications of a product whose left operand has this
    shape.

    The instruction is a `dot` or a call of cuBLAS, of which the first array of the
    result is the product.
    """
    contracted = re.search(
        r'lhs_contracting_dim\w+"?[=:][{[]([\d,"]*)', instruction.text
    )
    if not contracted:
        raise ValueError(
            "a product without dimensions in XLA's output: "
            f"{instruction.text.strip()[:300]}"
        )
    (sizes, *_), (out, *_) = arrays(left)[0], arrays(instruction.shape)[0]
    return (
        2
        * math.prod(out)
        * math.prod(sizes[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
    )


def _bytes(program: Program, instruction: Instruction, computation: Computation) -> int:
    """Return the bytes that an instruction reads from and writes to main memory, not
    to faster memory.
    """
    operands = [
        computation[name] for name in instruction.operands if name in computation
    ]
    if instruction.kind != "fusion":
        # without the workspace of cuBLAS
        result_shape = instruction.shape.partition(", s8[")[0]
        shapes = (result_shape, *(operand.shape for operand in operands))
        return sum(size for shape in shapes for _, size, main in arrays(shape) if main)
    fused = program.computations[instruction.called[0]]
    parameters = _parameters(fused)
    moved = 0
    for i, operand in enumerate(operands):
        if any(main for _, _, main in arrays(operand.shape)):
            moved += _read(program, fused, parameters[i])
    root = next(x for x in fused.values() if x.root)
    results = [root]
    if root.kind == "tuple":
        results = [fused[name] for name in root.operands]
    for result, (_, _, main) in zip(results, arrays(instruction.shape), strict=False):
        if main:
            moved += _written(program, fused, result)
    return moved


def _parameters(computation: Computation) -> list[Instruction]:
    """Return the parameters of a computation in the order of their numbers."""

    def number(parameter: Instruction) -> int:
        match = re.search(r"parameter\((\d+)\)", parameter.text)
        return int(match[1]) if match else 0

    parameters = [x for x in computation.values() if x.kind == "parameter"]
    return sorted(parameters, key=number)


def _read(program: Program, computation: Computation, value: Instruction) -> int:
    """Return the bytes of `value` that the computation reads: only a slice of it, if
    it uses no more.
    """
    total = 0
    size = bytes_of(value.shape)
    for user in computation.values():
        if value.name not in user.operands:
            continue
        number = user.operands.index(value.name)
        if user.kind in ("dynamic-slice", "slice", "gather") and number == 0:
            total += bytes_of(user.shape)
        elif user.kind == "bitcast":
            total += _read(program, computation, user)
        elif user.kind == "fusion":
            fused = program.computations[user.called[0]]
            total += _read(program, fused, _parameters(fused)[number])
        elif user.kind not in UPDATES or number != 0:
            total += size
    return min(total, size)


def _written(program: Program, computation: Computation, result: Instruction) -> int:
    """Return the bytes of `result` that are written: only the update, if it is
    updated in place.
    """
    if result.kind == "bitcast":
        return _written(program, computation, computation[result.operands[0]])
    if result.kind in UPDATES:
        return bytes_of(computation[result.operands[UPDATES[result.kind]]].shape)
    if result.kind == "fusion":
        fused = program.computations[result.called[0]]
        root = next(x for x in fused.values() if x.root)
        if root.kind != "tuple":
            return _written(program, fused, root)
    return bytes_of(result.shape)
