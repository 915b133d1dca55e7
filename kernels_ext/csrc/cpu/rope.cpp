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
  const RopeSizes sizes = check_rope_kv_write(op, check_tensor, qkv, cos, sin, positions, slot_mapping, k_cache, v_cache,
                                              num_heads, q_norm_weight, k_norm_weight);
  const int64_t T = sizes.T;

  const DecoderKernels& kernels = decoder_kernels(op, isa, dtype);
  Tensor q = empty_cpu({T, num_heads, sizes.head_dim}, qkv.scalar_type());
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
      .num_kv_heads = sizes.num_kv_heads,
      .head_dim = sizes.head_dim,
      .rotary_dim = sizes.rotary_dim,
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
