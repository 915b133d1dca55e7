// CUDA implementation of the decoder ops declared in csrc/schema_decoder.cpp.
#include "../decoder_checks.h"
#include "binding.h"
#include "decoder.cuh"

#include <limits>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace kernels {
namespace {

// Holds every tensor of a call to the device of its first.
class CheckTensor {
 public:
  explicit CheckTensor(const Tensor& first) : device_(first.get_device_index()) {}

  void operator()(const char* op, const char* name, const Tensor& t, ScalarType dtype, int64_t dim) const {
    KERNELS_CHECK(t.is_cuda() && t.get_device_index() == device_, op, ": ", name, " must be on cuda:", device_,
                  ", like the first argument");
    check_dtype(op, name, t, dtype);
    check_dim(op, name, t, dim);
    check_contiguous(op, name, t);
  }

 private:
  int32_t device_;
};

ElementType element_type(const char* op, const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return ElementType::kFloat32;
    case ScalarType::Half:
      return ElementType::kFloat16;
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    default:
      throw_value_error(op, ": ", name, " must be float32, bfloat16 or float16, got ", toString(t.scalar_type()));
  }
}

void check_isa(const char* op, int64_t isa) {
  KERNELS_CHECK(isa == 0, op, ": isa chooses among a processor's instruction sets; on a GPU it must be 0, got ", isa);
}

// The kernels hold sizes of one sequence, head or block in 32 bits.
int32_t narrow(const char* op, const char* what, int64_t value) {
  KERNELS_CHECK(value <= std::numeric_limits<int32_t>::max(), op, ": ", what, " is ", value, ", at most ",
                std::numeric_limits<int32_t>::max(), " is possible");
  return static_cast<int32_t>(value);
}

const void* pointer_or_null(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }

Tensor empty_like_shape(const Tensor& like, const std::vector<int64_t>& shape) {
  return torch::stable::new_empty(like, shape);
}

Tensor norm(const char* op, const Tensor& x, Tensor* residual, const Tensor& weight, double eps, int64_t isa) {
  check_isa(op, isa);
  const ElementType type = element_type(op, "x", x);
  const auto [T, H] = check_rms_norm(op, CheckTensor(x), x, residual, weight);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor y = empty_like_shape(x, {T, H});
  const RmsNormArguments arguments = {
      .x = x.const_data_ptr(),
      .residual = residual != nullptr ? residual->mutable_data_ptr() : nullptr,
      .weight = weight.const_data_ptr(),
      .y = y.mutable_data_ptr(),
      .T = T,
      .H = H,
      .eps = static_cast<float>(eps),
  };
  check_launch(op, launch_rms_norm(type, arguments, current_stream(x)));
  return y;
}

Tensor rms_norm_cuda(Tensor x, Tensor weight, double eps, int64_t isa) {
  return norm("rms_norm", x, nullptr, weight, eps, isa);
}

Tensor add_rms_norm_cuda(Tensor x, Tensor residual, Tensor weight, double eps, int64_t isa) {
  return norm("add_rms_norm", x, &residual, weight, eps, isa);
}

Tensor silu_mul_cuda(Tensor gate_up, int64_t isa) {
  constexpr const char* op = "silu_mul";
  check_isa(op, isa);
  const ElementType type = element_type(op, "gate_up", gate_up);
  const auto [T, F] = check_silu_mul(op, CheckTensor(gate_up), gate_up);
  const torch::stable::accelerator::DeviceGuard guard(gate_up.get_device_index());
  Tensor y = empty_like_shape(gate_up, {T, F});
  check_launch(op, launch_silu_mul(type, gate_up.const_data_ptr(), y.mutable_data_ptr(), T, F, current_stream(gate_up)));
  return y;
}

Tensor rope_kv_write_cuda(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slot_mapping, Tensor k_cache,
                          Tensor v_cache, int64_t num_heads, std::optional<Tensor> q_norm_weight,
                          std::optional<Tensor> k_norm_weight, double eps, int64_t isa) {
  constexpr const char* op = "rope_kv_write";
  check_isa(op, isa);
  const ElementType type = element_type(op, "qkv", qkv);
  const RopeSizes sizes = check_rope_kv_write(op, CheckTensor(qkv), qkv, cos, sin, positions, slot_mapping, k_cache,
                                              v_cache, num_heads, q_norm_weight, k_norm_weight);
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  Tensor q = empty_like_shape(qkv, {sizes.T, num_heads, sizes.head_dim});
  const RopeArguments arguments = {
      .qkv = qkv.const_data_ptr(),
      .cos = static_cast<const float*>(cos.const_data_ptr()),
      .sin = static_cast<const float*>(sin.const_data_ptr()),
      .positions = static_cast<const int64_t*>(positions.const_data_ptr()),
      .slots = static_cast<const int64_t*>(slot_mapping.const_data_ptr()),
      .q = q.mutable_data_ptr(),
      .k_cache = k_cache.mutable_data_ptr(),
      .v_cache = v_cache.mutable_data_ptr(),
      .q_norm_weight = pointer_or_null(q_norm_weight),
      .k_norm_weight = pointer_or_null(k_norm_weight),
      .T = sizes.T,
      .num_heads = narrow(op, "num_heads", num_heads),
      .num_kv_heads = narrow(op, "KV heads of k_cache", sizes.num_kv_heads),
      .head_dim = narrow(op, "the head size", sizes.head_dim),
      .rotary_dim = narrow(op, "columns of cos", sizes.rotary_dim),
      .eps = static_cast<float>(eps),
  };
  check_launch(op, launch_rope_kv_write(type, arguments, current_stream(qkv)));
  return q;
}

Tensor paged_attention_cuda(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start,
                            Tensor context_lens, double scale, std::optional<int64_t> window, int64_t isa) {
  constexpr const char* op = "paged_attention";
  check_isa(op, isa);
  const ElementType type = element_type(op, "q", q);
  const AttentionSizes sizes = check_paged_attention(op, CheckTensor(q), q, k_cache, v_cache, block_tables, query_start,
                                                     context_lens, window);
  KERNELS_CHECK(sizes.head_dim <= kMaxHeadDim, op, ": the head size is ", sizes.head_dim, ", at most ", kMaxHeadDim,
                " is possible on a GPU");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor out = empty_like_shape(q, {sizes.T, sizes.num_heads * sizes.head_dim});
  constexpr int64_t kAllPositions = std::numeric_limits<int32_t>::max();
  AttentionArguments arguments = {
      .q = q.const_data_ptr(),
      .k_cache = k_cache.const_data_ptr(),
      .v_cache = v_cache.const_data_ptr(),
      .block_tables = static_cast<const int32_t*>(block_tables.const_data_ptr()),
      .query_start = static_cast<const int32_t*>(query_start.const_data_ptr()),
      .context_lens = static_cast<const int32_t*>(context_lens.const_data_ptr()),
      .out = out.mutable_data_ptr(),
      .workspace = nullptr,
      .T = sizes.T,
      .S = narrow(op, "sequences", sizes.S),
      .max_blocks = narrow(op, "columns of block_tables", sizes.max_blocks),
      .block_size = narrow(op, "the block size", sizes.block_size),
      .num_heads = narrow(op, "heads of q", sizes.num_heads),
      .num_kv_heads = narrow(op, "KV heads of k_cache", sizes.num_kv_heads),
      .head_dim = narrow(op, "the head size", sizes.head_dim),
      .window = static_cast<int32_t>(window.value_or(kAllPositions) < kAllPositions ? *window : kAllPositions),
      .scale = static_cast<float>(scale),
  };
  int64_t floats = 0;
  check_launch(op, attention_workspace_floats(type, arguments, &floats));
  std::optional<Tensor> workspace;
  if (floats > 0) {
    const std::vector<int64_t> shape = {floats};
    workspace = torch::stable::new_empty(q, shape, ScalarType::Float);
    arguments.workspace = static_cast<float*>(workspace->mutable_data_ptr());
  }
  check_launch(op, launch_paged_attention(type, arguments, current_stream(q)));
  return out;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&kernels::rms_norm_cuda));
  m.impl("add_rms_norm", TORCH_BOX(&kernels::add_rms_norm_cuda));
  m.impl("silu_mul", TORCH_BOX(&kernels::silu_mul_cuda));
  m.impl("rope_kv_write", TORCH_BOX(&kernels::rope_kv_write_cuda));
  m.impl("paged_attention", TORCH_BOX(&kernels::paged_attention_cuda));
}
