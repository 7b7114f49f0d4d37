"""Messages between the devices of a mesh, read from a compiled program."""

import collections
import dataclasses
import itertools
import math
import re
import types
from collections.abc import Callable

from transformer_jax.compilation.hlo import (
    Computation,
    Instruction,
    Program,
    arrays,
    parse,
)

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_KIND = re.compile(rf"({'|'.join(KINDS)})(-start)?")
NOTHING: Computation = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind and group size in one step.

    bytes: total size of the full arrays over all `count` collectives.
    sent: total bytes that one device sends, assuming ring algorithms.
    overlapped: how many of the `count` run while the device computes something else.
    meanwhile: the bytes of `sent` that these send.
    """

    kind: str
    group: int  # number of devices in each communicating group
    count: int
    bytes: int
    sent: int
    overlapped: int = 0
    meanwhile: int = 0


def read_collectives(text: str, turns: int = 1) -> tuple[list[Collective], int]:
    """Return the collectives of a compiled program, and the number of loops with an
    unknown trip count.

    A collective in a loop counts once per iteration, or `turns` times if the trip count
    is unknown. Only loops that contain collectives are counted.
    """
    program = parse(text)
    totals: dict[tuple[str, int], list[int]] = collections.defaultdict(lambda: [0] * 5)
    guessed = 0

    def add(x: Instruction, kind: str, times: int, covered: bool) -> None:
        """Add a collective. `covered`: the device computes something while it runs."""
        group = _group_size(x.text)
        size = _size(x, group)
        parts = group - 1  # of `group` parts of the arrays, sent by each device
        if kind == "all-reduce":
            parts = 2 * (group - 1)
        elif kind == "collective-permute":
            parts = group
        sent = size * (parts / group)
        numbers = (1, size, sent, covered, sent * covered)
        for i, value in enumerate(numbers):
            totals[kind, group][i] += round(times * value)

    def visit(
        name: str,
        times: int,
        caller: Instruction | None = None,
        around: Computation = NOTHING,
    ) -> bool:
        """Add the collectives of computation `name`, which `caller` in `around` calls.

        Return True if it has any.
        """
        nonlocal guessed
        has_collectives = False
        computation = program.computations[name]
        for x in computation.values():
            if match := _KIND.fullmatch(x.kind):
                has_collectives = True
                kind = match[1]
                chain = _CHAIN.search(x.text)
                if not chain or caller is None:
                    if name.startswith("all-reduce-scatter"):
                        kind = "reduce-scatter"
                    in_background = bool(match[2])
                    covered = in_background and _covered(
                        program, computation, x, _waits_for(x)
                    )
                    add(x, kind, times, covered)
                elif caller.name.startswith("async-collective-start"):
                    ends = _ends(program, chain[0])
                    add(x, kind, times, _covered(program, around, caller, ends))
            trips = program.trips(x) if x.kind == "while" else 1
            calls = times * (turns if trips is None else trips)
            for called in x.called:
                called_has_collectives = visit(called, calls, x, computation)
                guessed += called_has_collectives and trips is None
                has_collectives |= called_has_collectives
        return has_collectives

    visit(program.entry, 1)
    listed = [
        Collective(kind, group, *numbers) for (kind, group), numbers in totals.items()
    ]
    return sorted(listed, key=lambda c: -c.sent), guessed


# The TPU compiler writes a collective in the background as a chain of fusions: one that
# starts it, some that compute something else, and one that waits for it. Each of them
# repeats the collective, with the same chain_id.
_CHAIN = re.compile(r'chain_id="\d+"')


def _waits_for(start: Instruction) -> Callable[[Instruction], bool]:
    """Return a function that is True for the instruction that waits for `start`,
    e.g. an all-gather-done.
    """
    return lambda x: start.name in x.operands


def _ends(program: Program, chain: str) -> Callable[[Instruction], bool]:
    """Return a function that is True for the fusion that waits for the collective
    with this chain_id.
    """

    def ends(x: Instruction) -> bool:
        if not x.name.startswith("async-collective-done"):
            return False
        return any(
            chain in y.text
            for name in x.called
            for y in program.computations[name].values()
        )

    return ends


def _covered(
    program: Program,
    computation: Computation,
    start: Instruction,
    ends: Callable[[Instruction], bool],
) -> bool:
    """Return True if anything is computed from `start` to before the next
    instruction for which `ends` is True.
    """
    after = itertools.dropwhile(lambda x: x is not start, computation.values())
    meanwhile = itertools.takewhile(lambda x: x is start or not ends(x), after)
    return any(map(program.computes, meanwhile))


def _size(instruction: Instruction, group: int) -> int:
    """Return the bytes of the full arrays of a collective.

    If it runs in the background, its shape has its operands, its results and, on TPUs,
    numbers in this order, except for an all-reduce.
    """
    listed = arrays(instruction.shape)
    if instruction.kind.endswith("-start") and instruction.kind != "all-reduce-start":
        sizes = [size for axes, size, _ in listed if axes]
        half = len(sizes) // 2
        return max(sum(sizes[:half]), sum(sizes[half:]))
    size = sum(size for _, size, _ in listed)
    return size * group if instruction.kind == "reduce-scatter" else size


def _group_size(line: str) -> int:
    """Return the size of the replica groups, which XLA writes in several notations."""
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        if axes and all(axis in sizes for axis, _ in axes):
            return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "source_target_pairs=" in line:
        return 1
    raise ValueError(
        f"unknown notation for replica groups in XLA's output: {line.strip()[:300]}"
    )
