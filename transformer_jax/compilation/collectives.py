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
        share = {"all-reduce": 2 * (group - 1), "collective-permute": group}.get(
            kind, group - 1
        ) / group
        for i, value in enumerate(
            (1, size, size * share, covered, size * share * covered)
        ):
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
        found = False
        for x in (computation := program.computations[name]).values():
            if match := _KIND.fullmatch(x.kind):
                found = True
                chain = _CHAIN.search(x.text)
                if not chain or caller is None:
                    kind = (
                        "reduce-scatter"
                        if name.startswith("all-reduce-scatter")
                        else match[1]
                    )
                    add(
                        x,
                        kind,
                        times,
                        bool(match[2])
                        and _covered(program, computation, x, _waits_for(x)),
                    )
                elif caller.name.startswith("async-collective-start"):
                    add(
                        x,
                        match[1],
                        times,
                        _covered(program, around, caller, _ends(program, chain[0])),
                    )
            trips = program.trips(x) if x.kind == "while" else 1
            for called in x.called:
                inside = visit(
                    called, times * (turns if trips is None else trips), x, computation
                )
                guessed += inside and trips is None
                found |= inside
        return found

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
    return any(
        map(
            program.computes,
            itertools.takewhile(lambda x: x is start or not ends(x), after),
        )
    )


def _size(instruction: Instruction, group: int) -> int:
    """Return the bytes of the full arrays of a collective.

    If it runs in the background, its shape has its operands, its results and, on TPUs,
    numbers in this order, except for an all-reduce.
    """
    found = arrays(instruction.shape)
    if instruction.kind.endswith("-start") and instruction.kind != "all-reduce-start":
        sizes = [size for axes, size, _ in found if axes]
        half = len(sizes) // 2
        return max(sum(sizes[:half]), sum(sizes[half:]))
    return sum(size for _, size, _ in found) * (
        group if instruction.kind == "reduce-scatter" else 1
    )


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
