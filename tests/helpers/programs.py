"""Compiled programs, as the compiler writes them."""

GPU = """HloModule jit_train_step, is_scheduled=true

%gemm_fusion_dot.1_computation (parameter_0: bf16[3,5], parameter_1: bf16[5,7]) -> f32[3,7] {
  %parameter_0 = bf16[3,5]{1,0} parameter(0)
  %parameter_1 = bf16[5,7]{1,0} parameter(1)
  ROOT %dot.2 = f32[3,7]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_scatter (table: f32[100,3], indices: s32[4,1], rows: f32[4,3]) -> f32[100,3] {
  %table = f32[100,3]{1,0} parameter(0)
  %indices = s32[4,1]{1,0} parameter(1)
  %rows = f32[4,3]{1,0} parameter(2)
  ROOT %scatter.1 = f32[100,3]{1,0} scatter(%table, %indices, %rows), update_window_dims={1}
}

%fused_add (p: f32[11]) -> f32[11] {
  %p = f32[11]{0} parameter(0)
  ROOT %sum = f32[11]{0} add(%p, %p)
}

ENTRY %main (x: bf16[3,5], w: bf16[5,7], v: f32[11]) -> f32[3,7] {
  %x = bf16[3,5]{1,0} parameter(0)
  %w = bf16[5,7]{1,0} parameter(1)
  %v = f32[11]{0} parameter(2)
  %all-gather-start.19 = ((f32[3]{0}, f32[5]{0}), (f32[24]{0}, f32[40]{0})) all-gather-start(%a, %b), channel_id=24, \
replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, use_global_device_ids=true
  %gemm_fusion_dot.1 = f32[3,7]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm_fusion_dot.1_computation, \
metadata={op_name="jit(train_step)/jvp(GPT.hidden)/decoder/while/body/layers/self_attention/query/dot_general"}, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %all-gather-done.19 = (f32[24]{0}, f32[40]{0}) all-gather-done(%all-gather-start.19)
  %call = (f32[3,7]{1,0}, s8[33554432]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(train_step)/jvp(GPT.hidden)/decoder/while/body/layers/feed_forward/inner/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %reduce-scatter-start = ((f32[16,3]{1,0}), f32[2,3]{1,0}) reduce-scatter-start(%g), channel_id=82, \
replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}
  %bitcast.4 = f32[21]{0} bitcast(%gemm_fusion_dot.1)
  %reduce-scatter-done = f32[2,3]{1,0} reduce-scatter-done(%reduce-scatter-start)
  %loop_add_fusion = f32[11]{0} fusion(%v), kind=kLoop, calls=%fused_add, metadata={op_name="jit(train_step)/add"}
  %zeros = f32[100,3]{1,0} parameter(3)
  %ids = s32[4,1]{1,0} parameter(4)
  %new = f32[4,3]{1,0} parameter(5)
  %input_scatter_fusion = f32[100,3]{1,0} fusion(%zeros, %ids, %new), kind=kInput, calls=%fused_scatter, \
metadata={op_name="jit(train_step)/transpose(jvp(GPT.hidden))/embedding/scatter-add"}
  ROOT %copy.1 = f32[3,7]{0,1} copy(%gemm_fusion_dot.1)
}
"""
