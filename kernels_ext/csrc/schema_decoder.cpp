// Schemas of the ops around a decoder step's linears. kernels_ext/decoder_ops.py documents each.
//
// T tokens of all sequences lie one after the other. The paged cache is [blocks, block_size, num_kv_heads, head_dim];
// a slot is block * block_size + offset. `isa` is 0 for the best this processor has, or an Isa (csrc/cpu/isa.h);
// kernels of other devices take only 0.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(kernels_ext, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, int isa=0) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, int isa=0) -> Tensor");
  m.def(
      "rope_kv_write(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache,"
      " Tensor(b!) v_cache, int num_heads, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, float eps=1e-06,"
      " int isa=0) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start,"
      " Tensor context_lens, float scale, int? window=None, int isa=0) -> Tensor");
  m.def("silu_mul(Tensor gate_up, int isa=0) -> Tensor");
}
