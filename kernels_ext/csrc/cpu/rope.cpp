// rope_kv_write for the CPU: checks and threads. The arithmetic is in rope.inl.

#include "decoder_ops.h"

namespace kernels {
namespace {

// About 3 us of work on one core: waking a thread costs as much.
constexpr int64_t kElementsPerThread = 16 * 1024;

void check_indices(const char* op, const char* name, const int64_t* index, int64_t n, int64_t limit,
                   const char* what) {
  for (int64_t i = 0; i < n; ++i) {
    KERNELS_CHECK(index[i] >= 0 && index[i] < limit, op, ": ", name, "[", i, "] is ", index[i],
                    ", outside 0 to ", limit - 1, " (", what, ")");
  }
}

Tensor rope_kv_write(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                     const Tensor& slot_mapping, const Tensor& k_cache, const Tensor& v_cache, int64_t num_heads,
                     const std::optional<Tensor>& q_norm_weight, const std::optional<Tensor>& k_norm_weight,
                     double eps, int64_t isa) {
  constexpr const char* op = "rope_kv_write";
  const Dtype dtype = kernel_dtype(op, "qkv", qkv);
  const ScalarType type = qkv.scalar_type();
  check_tensor(op, "qkv", qkv, type, 2);
  check_tensor(op, "k_cache", k_cache, type, 4);
  check_tensor(op, "v_cache", v_cache, type, 4);
  check_tensor(op, "cos", cos, ScalarType::Float, 2);
  check_tensor(op, "sin", sin, ScalarType::Float, 2);
  check_tensor(op, "positions", positions, ScalarType::Long, 1);
  check_tensor(op, "slot_mapping", slot_mapping, ScalarType::Long, 1);

  const int64_t T = qkv.size(0);
  const int64_t num_kv_heads = k_cache.size(2);
  const int64_t D = k_cache.size(3);
  for (int64_t i = 0; i < 4; ++i) check_size(op, "v_cache", v_cache, i, k_cache.size(i), "that of k_cache");
  KERNELS_CHECK(num_heads > 0, op, ": num_heads must be positive, got ", num_heads);
  check_size(op, "qkv", qkv, 1, (num_heads + 2 * num_kv_heads) * D,
             "(num_heads + 2 * KV heads of k_cache) * its head size");
  check_size(op, "positions", positions, 0, T, "rows of qkv");
  check_size(op, "slot_mapping", slot_mapping, 0, T, "rows of qkv");
  const int64_t rotary_dim = cos.size(1);
  KERNELS_CHECK(rotary_dim <= D && rotary_dim % 2 == 0, op,
                  ": cos must have an even number of columns, at most the head size ", D, ", got shape ",
                  shape_string(cos));
  check_size(op, "sin", sin, 0, cos.size(0), "rows of cos");
  check_size(op, "sin", sin, 1, rotary_dim, "columns of cos");
  if (q_norm_weight) {
    check_tensor(op, "q_norm_weight", *q_norm_weight, type, 1);
    check_size(op, "q_norm_weight", *q_norm_weight, 0, D, "the head size");
  }
  if (k_norm_weight) {
    check_tensor(op, "k_norm_weight", *k_norm_weight, type, 1);
    check_size(op, "k_norm_weight", *k_norm_weight, 0, D, "the head size");
  }

  const DecoderKernels& kernels = decoder_kernels(op, isa, dtype);
  Tensor q = empty_cpu({T, num_heads, D}, type);
  const RopeArgs args = {
      .qkv = qkv.const_data_ptr(),
      .cos = static_cast<const float*>(cos.const_data_ptr()),
      .sin = static_cast<const float*>(sin.const_data_ptr()),
      .positions = static_cast<const int64_t*>(positions.const_data_ptr()),
      .slots = static_cast<const int64_t*>(slot_mapping.const_data_ptr()),
      .q = q.mutable_data_ptr(),
      .k_cache = k_cache.mutable_data_ptr(),
      .v_cache = v_cache.mutable_data_ptr(),
      .q_norm_weight = q_norm_weight ? q_norm_weight->const_data_ptr() : nullptr,
      .k_norm_weight = k_norm_weight ? k_norm_weight->const_data_ptr() : nullptr,
      .num_heads = num_heads,
      .num_kv_heads = num_kv_heads,
      .head_dim = D,
      .rotary_dim = rotary_dim,
      .eps = static_cast<float>(eps),
  };
  check_indices(op, "positions", args.positions, T, cos.size(0), "rows of cos");
  check_indices(op, "slot_mapping", args.slots, T, k_cache.size(0) * k_cache.size(1), "slots of the cache");
  const int64_t width = qkv.size(1);
  parallel_ranges(T, width > 0 ? (kElementsPerThread + width - 1) / width : T,
                  [&](int64_t begin, int64_t end) { kernels.rope_kv_write(args, begin, end); });
  return q;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CPU, m) { m.impl("rope_kv_write", TORCH_BOX(&kernels::rope_kv_write)); }
