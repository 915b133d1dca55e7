// CUDA implementation of the 2:4 ops declared in csrc/schema_semi_structured.cpp.
#include "../checks.h"
#include "binding.h"
#include "semi_structured.cuh"

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace kernels {
namespace {

constexpr int64_t kInt = std::numeric_limits<int32_t>::max();

// Every number is checked: a plan sizes shared memory and addresses.
semi_structured::Plan plan_from(const char* op, const std::vector<int64_t>& numbers) {
  STD_TORCH_CHECK(numbers.size() == 8, op, ": plan must be 8 numbers, got ", numbers.size());
  struct Range {
    const char* name;
    int64_t least, most;
  };
  const Range ranges[8] = {{"N", 1, int64_t{semi_structured::kMaxStrips} * semi_structured::kStripRows},
                           {"K", 1, kInt},
                           {"k_slices", 1, 4096},
                           {"strips_per_block", 1, semi_structured::kMaxStrips},
                           {"warps", 1, 16},
                           {"k_warps", 1, 16},
                           {"x_groups", 1, 1024},
                           {"ring_slots", 1, 32}};
  for (size_t i = 0; i < 8; ++i) {
    STD_TORCH_CHECK(numbers[i] >= ranges[i].least && numbers[i] <= ranges[i].most, op, ": plan: ", ranges[i].name,
                    " must be ", ranges[i].least, " to ", ranges[i].most, ", got ", numbers[i]);
  }
  semi_structured::Plan plan = {};
  plan.N = numbers[0];
  plan.K = numbers[1];
  plan.k_slices = static_cast<int32_t>(numbers[2]);
  plan.strips_per_block = static_cast<int32_t>(numbers[3]);
  plan.warps = static_cast<int32_t>(numbers[4]);
  plan.k_warps = static_cast<int32_t>(numbers[5]);
  plan.x_groups = static_cast<int32_t>(numbers[6]);
  plan.ring_slots = static_cast<int32_t>(numbers[7]);
  STD_TORCH_CHECK(plan.warps % plan.k_warps == 0, op, ": plan: warps must be a multiple of k_warps, got ", plan.warps,
                  " and ", plan.k_warps);
  return plan;
}

void check_matrix(const char* op, const Tensor& dense) {
  check_dim(op, "dense", dense, 2);
  check_dtype(op, "dense", dense, ScalarType::Short);
  check_contiguous(op, "dense", dense);
  STD_TORCH_CHECK(dense.size(0) >= 1 && dense.size(1) >= 1, op, ": dense must not be empty");
  STD_TORCH_CHECK(dense.size(0) <= int64_t{semi_structured::kMaxStrips} * semi_structured::kStripRows &&
                      dense.size(1) <= kInt,
                  op, ": dense is too large: ", dense.size(0), " x ", dense.size(1));
}

void check_data(const char* op, const Tensor& data, int64_t N, int64_t K) {
  check_dim(op, "data", data, 1);
  check_dtype(op, "data", data, ScalarType::Byte);
  check_contiguous(op, "data", data);
  const int64_t want = semi_structured::data_bytes(N, K);
  STD_TORCH_CHECK(data.numel() == want, op, ": data has ", data.numel(), " bytes, a matrix of ", N, " x ", K, " takes ",
                  want);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data.const_data_ptr()) % 16 == 0, op,
                  ": data must start on a multiple of 16 bytes");
}

std::tuple<Tensor, Tensor> pack_cuda(Tensor dense) {
  constexpr const char* op = "semi_structured_pack";
  check_matrix(op, dense);
  const int64_t N = dense.size(0), K = dense.size(1);
  const torch::stable::accelerator::DeviceGuard guard(dense.get_device_index());
  const std::vector<int64_t> shape = {semi_structured::data_bytes(N, K)};
  const std::vector<int64_t> one = {1};
  Tensor data = torch::stable::new_empty(dense, shape, ScalarType::Byte);
  Tensor violations = torch::stable::new_zeros(dense, one, ScalarType::Int);
  check_launch(op, semi_structured::launch_pack(static_cast<const uint16_t*>(dense.const_data_ptr()), N, K,
                                                static_cast<uint8_t*>(data.mutable_data_ptr()),
                                                static_cast<int32_t*>(violations.mutable_data_ptr()),
                                                current_stream(dense)));
  return {data, violations};
}

void unpack_into_cuda(Tensor dense, Tensor data) {
  constexpr const char* op = "semi_structured_unpack_into";
  check_matrix(op, dense);
  check_data(op, data, dense.size(0), dense.size(1));
  check_same_device(op, "data", data, "dense", dense);
  const torch::stable::accelerator::DeviceGuard guard(dense.get_device_index());
  check_launch(op, semi_structured::launch_unpack(static_cast<const uint8_t*>(data.const_data_ptr()), dense.size(0),
                                                  dense.size(1), static_cast<uint16_t*>(dense.mutable_data_ptr()),
                                                  current_stream(dense)));
}

Tensor linear_cuda(Tensor x, Tensor data, std::optional<Tensor> bias, Tensor workspace,
                   std::vector<int64_t> plan_numbers, bool overlap_launch) {
  constexpr const char* op = "semi_structured_linear";
  const semi_structured::Plan plan = plan_from(op, plan_numbers);
  check_dim(op, "x", x, 2);
  check_size(op, "x", x, 1, plan.K, "K of the weight");
  check_contiguous(op, "x", x);
  const int64_t M = x.size(0);
  STD_TORCH_CHECK(M <= semi_structured::kMaxTokens, op, ": x has ", M, " rows, at most ",
                  semi_structured::kMaxTokens, " are possible");
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Half || type == ScalarType::BFloat16, op,
                  ": x must be float16 or bfloat16, got ", toString(type));
  check_data(op, data, plan.N, plan.K);
  check_same_device(op, "data", data, "x", x);
  check_same_device(op, "workspace", workspace, "x", x);
  check_dtype(op, "workspace", workspace, ScalarType::Byte);
  check_contiguous(op, "workspace", workspace);
  const int64_t workspace_bytes = semi_structured::workspace_bytes(plan, M);
  STD_TORCH_CHECK(workspace.numel() >= workspace_bytes, op, ": workspace has ", workspace.numel(),
                  " bytes, this launch needs ", workspace_bytes);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(workspace.const_data_ptr()) % 16 == 0, op,
                  ": workspace must start on a multiple of 16 bytes");
  const void* bias_pointer = nullptr;
  if (bias.has_value()) {
    check_dim(op, "bias", *bias, 1);
    check_size(op, "bias", *bias, 0, plan.N, "N of the weight");
    check_dtype(op, "bias", *bias, type);
    check_contiguous(op, "bias", *bias);
    check_same_device(op, "bias", *bias, "x", x);
    bias_pointer = bias->const_data_ptr();
  }
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const std::vector<int64_t> shape = {M, plan.N};
  Tensor y = torch::stable::new_empty(x, shape);
  check_launch(op, semi_structured::launch_linear(
                       plan,
                       type == ScalarType::Half ? semi_structured::Type::kHalf : semi_structured::Type::kBFloat16,
                       static_cast<const uint8_t*>(data.const_data_ptr()), x.const_data_ptr(), bias_pointer,
                       y.mutable_data_ptr(), workspace.mutable_data_ptr(), M, overlap_launch, current_stream(x)));
  return y;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CUDA, m) {
  m.impl("semi_structured_pack", TORCH_BOX(&kernels::pack_cuda));
  m.impl("semi_structured_unpack_into", TORCH_BOX(&kernels::unpack_into_cuda));
  m.impl("semi_structured_linear", TORCH_BOX(&kernels::linear_cuda));
}
