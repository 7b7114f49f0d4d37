"""Read the text of compiled programs (XLA's HLO): computations, instructions, loops,
sizes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
}
ITEM_BYTES |= {"s64": 8, "u64": 8, "f64": 8}
# The kinds of instructions that launch kernels of GPUs, except for collectives.
COMPUTING = ("fusion", "custom-call", "copy", "sort")

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<kind>[a-z][\w\-]*)\("
)
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"\}')
_CALLS = re.compile(
    r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
# of Pallas kernels: the only text that spans several lines
_METADATA = re.compile(r"kernel_metadata=\{\n.*\n\}")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    shape: of the result, e.g. "f32[3,5]{1,0}", or a tuple of shapes.
    text: the line.
    """

    name: str
    shape: str
    kind: str
    root: bool
    text: str

    @functools.cached_property
    def operands(self) -> list[str]:
        """The names of the operands, without their shapes."""
        _, _, rest = self.text.partition(f" {self.kind}(")
        arguments, _, _ = rest.partition(")")
        return re.findall(r"%([\w.\-]+)", arguments)

    @functools.cached_property
    def called(self) -> list[str]:
        """The computations that the instruction calls, including all branches of a
        conditional.
        """
        called = _CALLS.findall(self.text)
        if branches := _BRANCHES.search(self.text):
            called += [name.strip(" %") for name in branches[1].split(",")]
        return called

    @functools.cached_property
    def op_name(self) -> str:
        """The place in the traced program, e.g.
        "jit(train_step)/jvp(Transformer.hidden)/…/dot_general", or "".
        """
        match = re.search(r'op_name="([^"]*)"', self.text)
        return match[1] if match else ""


Computation = Mapping[str, Instruction]  # by name, in the order of the schedule


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a program.

    entry: the name of the first one to run.
    estimated: True if the compiler wrote its estimate of the cycles of each
        instruction, as that of TPUs does.
    """

    computations: Mapping[str, Computation]
    entry: str
    estimated: bool

    def computes(self, instruction: Instruction) -> bool:
        """Return True if the instruction itself takes the device's time; the body of
        a loop does, not the loop.
        """
        return (
            cycles_of(instruction) > 0
            if self.estimated
            else instruction.kind in COMPUTING
        )

    def trips(self, loop: Instruction) -> int | None:
        """Return the trip count of a `while`, or None if it depends on the data.

        The TPU compiler does not write it down. It is the only constant in the
        condition then.
        """
        if written := _TRIPS.search(loop.text):
            return int(written[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.text)
        if not condition:
            return None
        constants = []
        for x in self.computations[condition[1]].values():
            if x.kind != "constant":
                continue
            if number := re.search(r"constant\((\d+)\)", x.text):
                constants.append(int(number[1]))
        return constants[0] if len(constants) == 1 else None

    def walk(self, turns: int = 1) -> Iterator[tuple[Instruction, Computation, int]]:
        """Yield (instruction, its computation, how often it runs) for all instructions
        in the order of the schedule.

        Loops with an unknown trip count run `turns` times. All branches of a
        conditional run. The instructions inside a fusion are not visited.
        """

        def visit(
            name: str, times: int
        ) -> Iterator[tuple[Instruction, Computation, int]]:
            computation = self.computations[name]
            for instruction in computation.values():
                yield instruction, computation, times
                if instruction.kind == "while":
                    trips = self.trips(instruction)
                    times_inside = times * (turns if trips is None else trips)
                elif instruction.kind in ("conditional", "call", "async-start"):
                    times_inside = times
                else:
                    continue
                for called in instruction.called:
                    yield from visit(called, times_inside)

        yield from visit(self.entry, 1)


def parse(text: str) -> Program:
    """Return the program of an HLO text."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current = None
    text_in_lines = _METADATA.sub(lambda match: match[0].replace("\n", ""), text)
    for line in text_in_lines.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            name = match["name"]
            current[name] = Instruction(
                name, match["shape"], match["kind"], bool(match["root"]), line
            )
    return Program(computations, entry, '"estimated_cycles"' in text)


def arrays(shape: str) -> list[tuple[list[int], int, bool]]:
    """Return (sizes, bytes, True if it is in the device's main memory) of each array
    of a shape or tuple of shapes.
    """
    listed = []
    for kind, axes, layout in _ARRAY.findall(shape):
        sizes = [int(size) for size in axes.split(",") if size]
        total = ITEM_BYTES.get(kind, 1) * math.prod(sizes)
        in_main_memory = "S(" not in layout
        listed.append((sizes, total, in_main_memory))
    return listed


def cycles_of(instruction: Instruction) -> int:
    """Return the cycles that the TPU compiler estimates for an instruction, or 0 if
    there is no estimate.
    """
    match = re.search(r'"estimated_cycles":"(\d+)"', instruction.text)
    return int(match[1]) if match else 0


def bytes_of(shape: str) -> int:
    """Return the bytes of a shape or tuple of shapes."""
    return sum(size for _, size, _ in arrays(shape))
