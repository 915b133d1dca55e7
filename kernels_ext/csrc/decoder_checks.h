// Checks of the decoder ops' arguments that need no value on the device: the same for every device, so that an op
// refuses the same calls with the same words everywhere. Each returns the sizes it found.
//
// `check` is the device's part: check(op, name, tensor, dtype, dim) throws unless the tensor is a contiguous one of this
// dtype and number of dimensions on the device that the op runs on.
#pragma once

#include <optional>

#include "checks.h"

namespace kernels {

struct RmsNormSizes {
  int64_t T, H;
};

template <class Check>
RmsNormSizes check_rms_norm(const char* op, const Check& check, const Tensor& x, const Tensor* residual,
                            const Tensor& weight) {
  const ScalarType type = x.scalar_type();
  check(op, "x", x, type, 2);
  check(op, "weight", weight, type, 1);
  const RmsNormSizes sizes = {x.size(0), x.size(1)};
  KERNELS_CHECK(sizes.H > 0, op, ": x must have at least one column, got shape ", shape_string(x));
  check_size(op, "weight", weight, 0, sizes.H, "columns of x");
  if (residual != nullptr) {
    check(op, "residual", *residual, type, 2);
    check_size(op, "residual", *residual, 0, sizes.T, "rows of x");
    check_size(op, "residual", *residual, 1, sizes.H, "columns of x");
  }
  return sizes;
}

struct SiluMulSizes {
  int64_t T, F;
};

template <class Check>
SiluMulSizes check_silu_mul(const char* op, const Check& check, const Tensor& gate_up) {
  check(op, "gate_up", gate_up, gate_up.scalar_type(), 2);
  KERNELS_CHECK(gate_up.size(1) % 2 == 0, op, ": gate_up must have an even number of columns, got shape ",
                shape_string(gate_up));
  return {gate_up.size(0), gate_up.size(1) / 2};
}

struct RopeSizes {
  int64_t T, num_kv_heads, head_dim, rotary_dim;
};

template <class Check>
RopeSizes check_rope_kv_write(const char* op, const Check& check, const Tensor& qkv, const Tensor& cos,
                              const Tensor& sin, const Tensor& positions, const Tensor& slot_mapping,
                              const Tensor& k_cache, const Tensor& v_cache, int64_t num_heads,
                              const std::optional<Tensor>& q_norm_weight,
                              const std::optional<Tensor>& k_norm_weight) {
  const ScalarType type = qkv.scalar_type();
  check(op, "qkv", qkv, type, 2);
  check(op, "k_cache", k_cache, type, 4);
  check(op, "v_cache", v_cache, type, 4);
  check(op, "cos", cos, ScalarType::Float, 2);
  check(op, "sin", sin, ScalarType::Float, 2);
  check(op, "positions", positions, ScalarType::Long, 1);
  check(op, "slot_mapping", slot_mapping, ScalarType::Long, 1);

  const RopeSizes sizes = {qkv.size(0), k_cache.size(2), k_cache.size(3), cos.size(1)};
  for (int64_t i = 0; i < 4; ++i) check_size(op, "v_cache", v_cache, i, k_cache.size(i), "that of k_cache");
  KERNELS_CHECK(num_heads > 0, op, ": num_heads must be positive, got ", num_heads);
  check_size(op, "qkv", qkv, 1, (num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim,
             "(num_heads + 2 * KV heads of k_cache) * its head size");
  check_size(op, "positions", positions, 0, sizes.T, "rows of qkv");
  check_size(op, "slot_mapping", slot_mapping, 0, sizes.T, "rows of qkv");
  KERNELS_CHECK(sizes.rotary_dim <= sizes.head_dim && sizes.rotary_dim % 2 == 0, op,
                ": cos must have an even number of columns, at most the head size ", sizes.head_dim, ", got shape ",
                shape_string(cos));
  check_size(op, "sin", sin, 0, cos.size(0), "rows of cos");
  check_size(op, "sin", sin, 1, sizes.rotary_dim, "columns of cos");
  if (q_norm_weight) {
    check(op, "q_norm_weight", *q_norm_weight, type, 1);
    check_size(op, "q_norm_weight", *q_norm_weight, 0, sizes.head_dim, "the head size");
  }
  if (k_norm_weight) {
    check(op, "k_norm_weight", *k_norm_weight, type, 1);
    check_size(op, "k_norm_weight", *k_norm_weight, 0, sizes.head_dim, "the head size");
  }
  return sizes;
}

struct AttentionSizes {
  int64_t T, S, num_heads, num_kv_heads, head_dim, max_blocks, block_size;
};

template <class Check>
AttentionSizes check_paged_attention(const char* op, const Check& check, const Tensor& q, const Tensor& k_cache,
                                     const Tensor& v_cache, const Tensor& block_tables, const Tensor& query_start,
                                     const Tensor& context_lens, std::optional<int64_t> window) {
  const ScalarType type = q.scalar_type();
  check(op, "q", q, type, 3);
  check(op, "k_cache", k_cache, type, 4);
  check(op, "v_cache", v_cache, type, 4);
  check(op, "block_tables", block_tables, ScalarType::Int, 2);
  check(op, "query_start", query_start, ScalarType::Int, 1);
  check(op, "context_lens", context_lens, ScalarType::Int, 1);

  const AttentionSizes sizes = {
      .T = q.size(0),
      .S = context_lens.size(0),
      .num_heads = q.size(1),
      .num_kv_heads = k_cache.size(2),
      .head_dim = k_cache.size(3),
      .max_blocks = block_tables.size(1),
      .block_size = k_cache.size(1),
  };
  for (int64_t i = 0; i < 4; ++i) check_size(op, "v_cache", v_cache, i, k_cache.size(i), "that of k_cache");
  check_size(op, "q", q, 2, sizes.head_dim, "the head size of k_cache");
  KERNELS_CHECK(sizes.head_dim > 0 && sizes.num_heads > 0 && sizes.num_kv_heads > 0 &&
                    sizes.num_heads % sizes.num_kv_heads == 0,
                op, ": q has ", sizes.num_heads, " heads of size ", sizes.head_dim, ", expected a multiple of the ",
                sizes.num_kv_heads, " KV heads of k_cache");
  check_size(op, "block_tables", block_tables, 0, sizes.S, "sequences in context_lens");
  check_size(op, "query_start", query_start, 0, sizes.S + 1, "sequences in context_lens + 1");
  KERNELS_CHECK(!window || *window > 0, op, ": window must be positive, got ", window.value_or(0));
  return sizes;
}

}  // namespace kernels
