"""Schedules of TPU and GPU programs: cycles, FLOPs, bytes and overlap, read from
excerpts of compiled programs.
"""

import dataclasses

import pytest

from helpers.programs import GPU
from transformer_jax.compilation.chips import Chip
from transformer_jax.compilation.hlo import parse
from transformer_jax.compilation.step_time import (
    convolution_flops,
    kernel_flops,
    part_of,
    product_flops,
    read_step_time,
)

# 1 FLOP/s, 1 byte/s and 1 cycle/s, so that seconds are FLOPs, bytes or cycles.
UNIT = Chip(memory=1, peak=1, bandwidth=1, clock=1, topologies=())

FORWARD = 'metadata={op_name="jit(train_step)/jvp(Transformer.hidden)/decoder'

# A loop over 6 layers with a product, an update in place and a slice; a loop of unknown
# length; a fill; prefetches.
PROGRAM = f"""HloModule jit_train_step, is_scheduled=true

%product (a: f32[3,5], b: f32[5,7]) -> f32[3,7] {{
  %a = f32[3,5]{{1,0:T(8,128)}} parameter(0)
  %b = f32[5,7]{{1,0:T(8,128)S(1)}} parameter(1)
  ROOT %out = f32[3,7]{{1,0:T(8,128)}} convolution(%a, %b), dim_labels=bf_io->bf
}}

%update (stack: f32[6,3,7], x: f32[3,7], i: s32[]) -> f32[6,3,7] {{
  %stack = f32[6,3,7]{{2,1,0}} parameter(0)
  %x = f32[3,7]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %x1 = f32[1,3,7]{{2,1,0}} bitcast(%x)
  ROOT %new = f32[6,3,7]{{2,1,0}} dynamic-update-slice(%stack, %x1, %i, %i, %i)
}}

%body (p: (s32[], f32[6,3,7])) -> (s32[], f32[6,3,7]) {{
  %x.1 = f32[3,5]{{1,0:T(8,128)}} get-tuple-element(%p), index=0
  %w.1 = f32[5,7]{{1,0:T(8,128)S(1)}} get-tuple-element(%p), index=1
  %s.1 = f32[6,3,7]{{2,1,0}} get-tuple-element(%p), index=2
  %i.1 = s32[]{{:T(128)S(6)}} get-tuple-element(%p), index=3
  %y = f32[3,7]{{1,0:T(8,128)}} fusion(%x.1, %w.1), calls=%product, {FORWARD}/layers/self_attention/dot_general"}}, \
backend_config={{"window_config":{{"estimated_cycles":"1000"}}}}
  %z = f32[6,3,7]{{2,1,0}} fusion(%s.1, %y, %i.1), calls=%update, {FORWARD}/while/body/dynamic_update_slice"}}, \
backend_config={{"window_config":{{"estimated_cycles":"500"}}}}
  ROOT %t = (s32[], f32[6,3,7]) tuple(%i.1, %z)
}}

%condition (p: (s32[], f32[6,3,7])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(6)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}

%chunk (p: f32[]) -> f32[] {{
  ROOT %r = f32[11]{{0}} negate(%q), metadata={{op_name="jit(train_step)/jvp()/while/body/neg"}}, \
backend_config={{"estimated_cycles":"40"}}
}}

%unknown (p: s32[]) -> pred[] {{
  ROOT %less = pred[] compare(%p, %n), direction=LT
}}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {{
  %fill = f32[6,3,7]{{2,1,0}} broadcast(%zero), metadata={{op_name="broadcast.3"}}, \
backend_config={{"estimated_cycles":"900"}}
  %loop = (s32[], f32[6,3,7]) while(%init), condition=%condition, body=%body
  %loss = f32[] while(%zero), condition=%unknown, body=%chunk
  %early = (f32[13]{{0:S(1)}}, f32[13]{{0}}, u32[]{{:S(2)}}) copy-start(%p)
  %part = ((f32[100]{{0}}), f32[17]{{0:S(1)}}, s32[]{{:S(2)}}) slice-start(%p), slice={{[0:17]}}
  ROOT %adam = f32[19]{{0}} sqrt(%p), metadata={{op_name="jit(train_step)/sqrt"}}, \
backend_config={{"estimated_cycles":"7"}}
}}
"""


def test_times_by_part_of_the_model():
    found = read_step_time(parse(PROGRAM), UNIT, turns=5)
    assert {
        name: (time.estimate, time.bound) for name, time in found.parts.items()
    } == {
        "attention": (6 * 1000, 6 * 1000),
        # a fill; reads and writes one of 6 layers
        "buffers": (900 + 6 * 500, 4 * 6 * 21 + 6 * 2 * 4 * 21),
        "loss": (5 * 40, 5 * 4 * 11),
        "optimizer": (7, 4 * 19),
    }
    assert list(found.parts) == ["attention", "buffers", "loss", "optimizer"]
    assert found.flops == 6 * 2 * 3 * 5 * 7
    assert found.guessed == 1
    # %w, a factor of the product, is in faster memory.
    synchronous = 6 * 4 * (15 + 21) + 4 * 6 * 21 + 6 * 2 * 4 * 21 + 5 * 4 * 11 + 4 * 19
    assert found.memory_s == synchronous + 4 * 13 + 4 * 17
    assert found.estimate == 6000 + 3900 + 200 + 7
    assert found.bound == 6000 + 1512 + 220 + 76 > found.memory_s
    fast = read_step_time(
        parse(PROGRAM), dataclasses.replace(UNIT, clock=1000.0), turns=5
    )
    # the prefetches make all bytes take longer than the instructions one by one
    assert fast.bound == fast.memory_s


def test_products_with_padding_do_not_count():
    """A product with a batch axis of 16 is a convolution with a window of 16, padded
    by 15 on both sides.
    """
    line = (
        "  %c = f32[128,64,16,64]{0,3,2,1} convolution(%a, %b), window={size=1x16"
        " pad=0_0x15_15 rhs_reversal=0x1}, dim_labels=b0f1_1oi0->b01f"
    )
    (instruction,) = (
        parse(f"ENTRY %main (a: f32[]) -> f32[] {{\n{line}\n}}")
        .computations["main"]
        .values()
    )
    flops = convolution_flops(
        instruction, "f32[128,64,1024,1]{2,1,0,3}", "bf16[16,64,1024,1]{2,1,0,3}"
    )
    assert flops == 2 * 128 * 64 * 1024 * 16 * 64


def test_products_with_dilation_count_only_where_there_are_values():
    """With a dilation of 5 and a stride of 4, each of the 5 places of a window of 5
    meets one value.
    """
    line = (
        "  %c = f32[2,5,3]{2,1,0} convolution(%a, %b), window={size=5 stride=4 pad=0_0"
        " lhs_dilate=5}, dim_labels=b0f_0io->b0f"
    )
    (instruction,) = (
        parse(f"ENTRY %main (a: f32[]) -> f32[] {{\n{line}\n}}")
        .computations["main"]
        .values()
    )
    assert (
        convolution_flops(instruction, "f32[2,5,7]{2,1,0}", "f32[5,7,3]{2,1,0}")
        == 2 * 2 * 3 * 7 * 5
    )


def splash(phase, operands, layout=1):
    """Return a kernel of splash attention as XLA writes it, over several lines.

    `layout` is that of the keys.
    """
    return f"""ENTRY %main (a: f32[]) -> f32[] {{
  %splash_mha_{phase}.1 = (f32[7,11]{{1,0}}, bf16[2,3,256,8]{{3,2,1,0}}) custom-call(%a), \
custom_call_target="tpu_custom_call", operand_layout_constraints={{{operands}}}, \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 128, \\"q_layout\\": 1, \\"k_layout\\": {layout}, \\"v_layout\\": 1}}"
}}}}, metadata={{op_name="jit(train_step)/jvp(T)/self_attention/jit(_splash_attention)/splash_mha_{phase}/\
splash_mha_{phase}/pallas_call" stack_frame_id=18}}
}}"""


@pytest.mark.parametrize(
    ("phase", "products"),
    [
        ("fwd_segmented_residuals", 8 + 16),
        ("fwd_no_residuals", 8 + 16),
        ("dq_no_residuals", 2 * 8 + 16),
        ("dkv_segmented_no_residuals", 2 * 8 + 2 * 16),
    ],
)
def test_kernels_of_splash_attention_count(phase, products):
    """Queries (2, 3, 256, 8), keys (2, 1, 384, 8), values (2, 1, 384, 16): 8 and 16
    are the widths of the products.
    """
    arrays = (
        "bf16[2,3,256,8]{3,2,1,0}, bf16[2,1,384,8]{3,2,1,0}, bf16[2,1,384,16]{3,2,1,0},"
        " s32[2,256,128]{2,1,0}"
    )
    program = parse(splash(phase, arrays))
    (kernel,) = program.computations["main"].values()
    flops = 2 * 2 * 3 * 256 * 384 * products
    assert kernel_flops(kernel) == flops
    (swapped,) = (
        parse(splash(phase, arrays.replace("384,8", "8,384"), 2))
        .computations["main"]
        .values()
    )
    assert kernel_flops(swapped) == flops
    found = read_step_time(program, UNIT)
    assert (found.flops, list(found.parts)) == (flops, ["attention"])
    assert found.estimate == found.bound == flops


@pytest.mark.parametrize(
    ("name", "cycles"),
    [
        ("short_forward", 4.9 + 3.3),
        ("short_backward", 12.8 + 0.3),
        ("short_backward_dropout", 17.7),
    ],
)
@pytest.mark.parametrize("place", ["{}", "transpose(jvp({}))"])
def test_our_kernels_state_what_they_compute(name, cycles, place):
    """3 × 1,024 scores, 100 keys in a block, 999 FLOPs.

    The estimate is the longer one of cycles and products.
    """
    within = place.format(name)
    text = f"""ENTRY %main (a: f32[]) -> f32[] {{
  %k = bf16[1,1,1]{{2,1,0}} custom-call(%a), custom_call_target="tpu_custom_call", \
operand_layout_constraints={{s32[7,1,64]{{2,1,0}}, \
s32[7,1,100]{{2,1,0}}, bf16[7,64,128]{{2,1,0}}}}, metadata={{op_name=\
"jit(train_step)/transpose(jvp(T))/self_attention/jit(short_attention)/{within}/pallas_call"}}, \
backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"999","transcendentals":"3072","bytes_accessed":"7"}}}}}}
}}"""
    found = read_step_time(parse(text), UNIT)
    assert (found.flops, list(found.parts), found.bound) == (999, ["attention"], 999)
    assert found.estimate == 999
    slow = dataclasses.replace(UNIT, clock=0.01)
    assert read_step_time(parse(text), slow).estimate == pytest.approx(
        3 * cycles / 0.01
    )
    half = dataclasses.replace(slow, kernel_slowness=0.5)
    assert read_step_time(parse(text), half).estimate == pytest.approx(
        1.5 * cycles / 0.01
    )


def test_blocks_above_the_diagonal_do_not_count():
    """Of 4 × 4 blocks, 10 are computed."""
    arrays = "s8[1,4,4]{2,1,0}, s8[1,4,4]{2,1,0}, " + ", ".join(
        ["f32[2,3,512,8]{3,2,1,0}"] * 3
    )
    (kernel,) = parse(splash("fwd_residuals", arrays)).computations["main"].values()
    assert kernel_flops(kernel) == 2 * 2 * 3 * 512 * 512 * (8 + 8) * 10 // 16


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        (
            "jit(train_step)/jvp(Transformer.hidden)/decoder/while/body/layers/cross_attention/dot_general",
            "attention",
        ),
        (
            "jit(train_step)/jvp(T)/layers/self_attention_residual.before/layer_norm/div",
            "norm and residual",
        ),
        (
            "jit(train_step)/transpose(jvp(T))/layers/feed_forward/outer/dot_general",
            "feed-forward",
        ),
        (
            "jit(train_step)/transpose(jvp(T))/while/body/jit(dynamic_index_in_dim)/dynamic_slice",
            "buffers",
        ),
        (
            "jit(train_step)/jvp(T)/cross_attention/splash_mha_fwd_no_residuals/pallas_call",
            "attention",
        ),
        ("", "buffers"),
        ("jit(train_step)/jvp()/while/body/vmap(jvp())/reduce_sum", "loss"),
        ("jit(train_step)/transpose(jvp())/mul", "loss"),
        ("jit(train_step)/jvp(jit(argsort))/sort", "loss"),
        ("jit(train_step)/jit(_where)/select_n", "optimizer"),
        ("jit(train_step)/jvp(T)/target_embedding/gather", "embedding"),
        ("jit(train_step)/jvp(RecurrentSeq2Seq.hidden)/cell/dot_general", "other"),
        ("jit(_start)/while/body/exp", "other"),
    ],
)
def test_parts_are_read_from_op_names(op_name, part):
    assert part_of(op_name) == part


# Lines of programs for H100 GPUs: calls of cuBLAS, the second with a batch axis, and a
# product that Triton compiles.
PRODUCTS = [
    (
        (
            "(f32[8192,1536]{1,0}, s8[33554432]{0}) custom-call(%bitcast.24.0,"
            " %input_concatenate_fusion.5), "
            'custom_call_target="__cublas$lt$matmul",'
            ' backend_config={"operation_queue_id":"0","gemm_backend_config":'
            '{"alpha_real":1,"beta":0,"dot_dimension_numbers":'
            '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
            '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
        ),
        "bf16[8192,512]{1,0}",
        2 * 8192 * 512 * 1536,
    ),
    (
        (
            "(f32[1024,64,32]{2,1,0}, s8[33554432]{0}) custom-call(%bitcast.596.0,"
            " %bitcast.597.0), "
            'custom_call_target="__cublas$lt$matmul",'
            ' backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,'
            '"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
            '"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"],'
            '"rhs_batch_dimensions":["0"]}}}'
        ),
        "bf16[1024,64,128]{2,1,0}",
        2 * 1024 * 64 * 128 * 32,
    ),
    (
        (
            "f32[8,512,256]{2,1,0} dot(%parameter_0.19, %parameter_1.19),"
            " lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0},"
            ' rhs_contracting_dims={1}, backend_config={"sizes":["16"]}'
        ),
        "bf16[512,8,4640]{2,1,0}",
        2 * 8 * 512 * 4640 * 256,
    ),
    (
        "f32[7]{0} dot(%a, %b), lhs_contracting_dims={0,2}, rhs_contracting_dims={0,1}",
        "f32[3,7,5]{2,1,0}",
        2 * 3 * 7 * 5,
    ),
]


@pytest.mark.parametrize(("line", "left", "flops"), PRODUCTS)
def test_products_on_gpus(line, left, flops):
    program = parse(f"ENTRY %main (a: f32[]) -> f32[] {{\n  %x = {line}\n}}")
    (instruction,) = program.computations["main"].values()
    assert product_flops(instruction, left) == flops


def test_gpu_programs_have_only_bounds():
    found = read_step_time(parse(GPU), dataclasses.replace(UNIT, clock=None))
    product = 2 * 3 * 5 * 7
    size = 2 * (15 + 35) + 4 * 21  # without the workspace of cuBLAS
    assert product > size
    assert {name: time.bound for name, time in found.parts.items()} == {
        "attention": product,
        "feed-forward": product,
        "buffers": 2 * 4 * 21,
        "optimizer": 2 * 4 * 11,
        "embedding": 4 * 4 + 2 * 4 * 4 * 3,  # the rows that change, not the whole table
    }
    assert found.estimate is None
    assert {time.estimate for time in found.parts.values()} == {None}
    assert found.flops == 2 * product
    others = 2 * 4 * 21 + 2 * 4 * 11 + 4 * 4 + 2 * 4 * 4 * 3
    assert found.memory_s == 2 * size + others
    assert found.bound == 2 * product + others
