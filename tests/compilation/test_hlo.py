"""The text of compiled programs, read by hand."""

import pytest

from transformer_jax.compilation import hlo

LOOP = """HloModule m

%body (p: f32[3]) -> f32[3] {
  %p = f32[3]{0} parameter(0)
  ROOT %n = f32[3]{0} negate(%p)
}

%condition (p: f32[3]) -> pred[] {
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%p, %five), direction=LT
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  ROOT %w = f32[3]{0} while(%x), condition=%condition, body=%body TRIPS
}
"""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[3,5]{1,0}", [([3, 5], 60, True)]),
        ("pred[]", [([], 1, True)]),
        ("(bf16[7]{0}, s64[2]{0:S(1)})", [([7], 14, True), ([2], 16, False)]),
    ],
)
def test_sizes_bytes_and_memory_of_a_shape(shape, expected):
    assert hlo.arrays(shape) == expected
    assert hlo.bytes_of(shape) == sum(size for _, size, _ in expected)


@pytest.mark.parametrize(
    ("written", "times"),
    [("", 5), (', backend_config={"known_trip_count":{"n":"4"}}', 4)],
)
def test_the_body_of_a_loop_runs_as_often_as_the_loop_turns(written, times):
    program = hlo.parse(LOOP.replace(" TRIPS", written))
    runs = {instruction.name: count for instruction, _, count in program.walk()}
    assert (runs["w"], runs["n"]) == (1, times)


def test_a_loop_that_depends_on_its_data_turns_as_often_as_is_assumed():
    program = hlo.parse(LOOP.replace(" TRIPS", "").replace("constant(5)", "add(%p)"))
    loop = program.computations["main"]["w"]
    assert program.trips(loop) is None
    assert {count for _, _, count in program.walk(turns=7)} == {1, 7}


def test_an_instruction_knows_its_operands_and_its_place_in_the_traced_program():
    line = '  ROOT %a = f32[] add(%b, %c.1), metadata={op_name="jit(step)/add"}'
    program = hlo.parse(f"ENTRY %main () -> f32[] {{\n{line}\n}}")
    instruction = program.computations[program.entry]["a"]
    assert instruction.operands == ["b", "c.1"]
    assert instruction.op_name == "jit(step)/add"
    assert instruction.root
