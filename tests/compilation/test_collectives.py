"""Collectives that are read from compiled programs."""

import pytest

from helpers.programs import GPU
from transformer_jax.compilation.collectives import Collective, read_collectives

HLO = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%layer (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %gathered = f32[16,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %both = (f32[3]{0}, bf16[5]{0}) all-reduce(%a, %b), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[4,8]) tuple(%i, %x)
}

%chunk (p: f32[]) -> f32[] {
  ROOT %r = f32[2,4]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
}

%condition (p: s32[]) -> pred[] {
  ROOT %less = pred[] compare(%p, %n), direction=LT
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8]) while(%init), condition=%condition, body=%layer, x={"known_trip_count":{"n":"6"}}
  %data = f32[] while(%zero), condition=%condition, body=%chunk
  %either = f32[] conditional(%p, %a, %b), branch_computations={%chunk, %condition}
  %start = (f32[5]{0}, f32[10]{0}) all-gather-start(%p), channel_id=5, replica_groups={{0,1},{2,3}}, dimensions={0}
  %moved = f32[10]{0} collective-permute(%p), channel_id=4, source_target_pairs={{0,1},{1,0}}
  ROOT %out = f32[4,8] get-tuple-element(%loop), index=1
}
"""


def test_collectives_are_counted_with_their_loops():
    found, guessed = read_collectives(HLO, turns=5)
    assert guessed == 1
    assert set(found) == {
        Collective("all-gather", 4, 6, 6 * 16 * 8 * 4, 6 * 16 * 8 * 4 * 3 // 4),
        # the bytes of its result, not of its operand
        Collective("all-gather", 2, 1, 40, 20),
        Collective("all-reduce", 2, 6, 6 * (12 + 10), 6 * (12 + 10)),
        # in the loop and in a branch
        Collective("reduce-scatter", 4, 5 + 1, 6 * 4 * 32, 6 * 4 * 32 * 3 // 4),
        Collective("collective-permute", 1, 1, 40, 40),
    }
    assert [c.sent for c in found] == sorted((c.sent for c in found), reverse=True)


@pytest.mark.parametrize("groups", ["all", "mesh['axis-0'=4] {'axis-0'}"])
def test_groups_that_nobody_knows_are_an_error(groups):
    with pytest.raises(
        ValueError,
        match="unknown notation for replica groups in XLA's output: %gathered",
    ):
        read_collectives(
            HLO.replace("replica_groups=[2,4]<=[8]", f"replica_groups={groups}")
        )


# A chain of fusions gathers 8 × 3 numbers while a product is computed. Another one
# waits at once. A third is not split.
CHAINS = """HloModule jit_train_step, is_scheduled=true

%start.1 (p: f32[3]) -> f32[24] {
  %g.1 = f32[24]{0} all-gather(%p), replica_groups=[4,8]<=[32], frontend_attributes={chain_id="0"}
  ROOT %c.1 = f32[24]{0} custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%within (p: f32[3]) -> f32[24] {
  ROOT %g.2 = f32[24]{0} all-gather(%p), replica_groups=[4,8]<=[32], frontend_attributes={chain_id="0"}
}

%done.1 (p: f32[3]) -> f32[24] {
  ROOT %g.3 = f32[24]{0} all-gather(%p), replica_groups=[4,8]<=[32], frontend_attributes={chain_id="0"}
}

%start.2 (p: f32[3]) -> f32[24] {
  ROOT %g.4 = f32[24]{0} all-gather(%p), replica_groups=[4,8]<=[32], frontend_attributes={chain_id="1"}
}

%done.2 (p: f32[3]) -> f32[24] {
  ROOT %g.5 = f32[24]{0} all-gather(%p), replica_groups=[4,8]<=[32], frontend_attributes={chain_id="1"}
}

%all-reduce-scatter.7 (p: f32[24]) -> f32[3] {
  %whole = f32[24]{0} all-reduce(%p), replica_groups=[4,8]<=[32], to_apply=%add
  ROOT %mine = f32[3]{0} dynamic-slice(%whole, %i)
}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[3]) -> f32[3] {
  %async-collective-start.1 = (f32[3]{0}, f32[24]{0}) fusion(%p), kind=kCustom, calls=%start.1
  %product = f32[3]{0} fusion(%q), kind=kOutput, calls=%within, backend_config={"estimated_cycles":"70"}
  %async-collective-done.1 = f32[24]{0} fusion(%product), kind=kCustom, calls=%done.1
  %async-collective-start.2 = (f32[3]{0}, f32[24]{0}) fusion(%p), kind=kCustom, calls=%start.2
  %async-collective-done.2 = f32[24]{0} fusion(%g), kind=kCustom, calls=%done.2
  %reduce = f32[3]{0} fusion(%async-collective-done.2), kind=kCustom, calls=%all-reduce-scatter.7
  %sum-start = f32[5]{0} all-reduce-start(%v), replica_groups=[4,8]<=[32], to_apply=%add
  %other = f32[5]{0} negate(%v), backend_config={"estimated_cycles":"9"}
  ROOT %sum-done = f32[5]{0} all-reduce-done(%sum-start)
}
"""


def test_collectives_that_overlap_with_computation():
    found, _ = read_collectives(CHAINS)
    assert set(found) == {
        # Each once, although a chain repeats it.
        Collective("all-gather", 8, 2, 2 * 96, 2 * 84, overlapped=1, meanwhile=84),
        Collective("reduce-scatter", 8, 1, 96, 84),
        Collective("all-reduce", 8, 1, 20, 35, overlapped=1, meanwhile=35),
    }


def test_collectives_of_gpu_programs():
    """The bytes are those of full arrays: the results of an all-gather, the operands
    of a reduce-scatter.
    """
    found, _ = read_collectives(GPU)
    assert set(found) == {
        Collective(
            "all-gather",
            8,
            1,
            4 * (24 + 40),
            sent := 4 * (24 + 40) * 7 // 8,
            overlapped=1,
            meanwhile=sent,
        ),
        # only a bitcast runs
        Collective(
            "reduce-scatter", 8, 1, 4 * 16 * 3, 4 * 16 * 3 * 7 // 8, overlapped=0
        ),
    }
