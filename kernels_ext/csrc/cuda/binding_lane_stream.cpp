// CUDA implementation of the lane-stream ops declared in csrc/schema_lane_stream.cpp.
#include "../checks.h"
#include "binding.h"
#include "lane_stream.cuh"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace kernels {
namespace {

// Of one call: more than a launch takes go in several launches. Past this many, decompressing the weight once and
// multiplying it by cuBLAS costs less.
constexpr int64_t kMaxCallTokens = 256;

// Every number is checked: a plan sizes shared memory and addresses.
LaneStreamPlan plan_from(const char* op, const std::vector<int64_t>& numbers) {
  STD_TORCH_CHECK(numbers.size() == 8, op, ": plan must be 8 numbers, got ", numbers.size());
  struct Range {
    const char* name;
    int64_t least, most;
  };
  constexpr int64_t kInt = std::numeric_limits<int32_t>::max();
  const Range ranges[8] = {{"N", 1, kMaxStrips * kStripRows},
                           {"K", 1, kInt},
                           {"group_tiles", 2, 4},
                           {"k_slices", 1, 4096},
                           {"blocks_per_slice", 1, 65536},
                           {"warps_per_block", 1, kMaxWarps},
                           {"lookahead", 1, kMaxLookahead},
                           {"ring_rows", kMinRingRows, 4096}};
  for (size_t i = 0; i < 8; ++i) {
    STD_TORCH_CHECK(numbers[i] >= ranges[i].least && numbers[i] <= ranges[i].most, op, ": plan: ", ranges[i].name,
                    " must be ", ranges[i].least, " to ", ranges[i].most, ", got ", numbers[i]);
  }
  STD_TORCH_CHECK(numbers[2] != 3, op, ": plan: group_tiles must be 2 or 4, got 3");
  LaneStreamPlan plan = {};
  plan.N = numbers[0];
  plan.K = numbers[1];
  plan.group_tiles = static_cast<int32_t>(numbers[2]);
  plan.k_slices = static_cast<int32_t>(numbers[3]);
  plan.blocks_per_slice = static_cast<int32_t>(numbers[4]);
  plan.warps_per_block = static_cast<int32_t>(numbers[5]);
  plan.lookahead = static_cast<int32_t>(numbers[6]);
  plan.ring_rows = static_cast<int32_t>(numbers[7]);
  // The kernels count a slice's groups in 32 bits.
  STD_TORCH_CHECK(plan.slice_groups() <= kInt, op, ": plan: a slice has ", plan.slice_groups(), " groups, at most ",
                  kInt, " are possible");
  STD_TORCH_CHECK(plan.blocks_per_slice <= plan.slice_groups(), op, ": plan: a slice has ", plan.blocks_per_slice,
                  " blocks, but only ", plan.slice_groups(), " groups for each warp");
  return plan;
}

void check_dense(const char* op, const Tensor& dense, const LaneStreamPlan& plan) {
  check_dim(op, "dense", dense, 2);
  check_size(op, "dense", dense, 0, plan.N, "N of the plan");
  check_size(op, "dense", dense, 1, plan.K, "K of the plan");
  check_dtype(op, "dense", dense, ScalarType::Short);
  check_contiguous(op, "dense", dense);
}

void check_weight(const char* op, const Tensor& data, const Tensor& descriptors, const LaneStreamPlan& plan) {
  check_dim(op, "data", data, 1);
  check_dtype(op, "data", data, ScalarType::Byte);
  check_contiguous(op, "data", data);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data.const_data_ptr()) % 128 == 0, op,
                  ": data must start on a multiple of 128 bytes");
  check_dim(op, "descriptors", descriptors, 2);
  check_size(op, "descriptors", descriptors, 0, plan.streams(), "streams of the plan");
  check_size(op, "descriptors", descriptors, 1, 12, "48 bytes a stream");
  check_dtype(op, "descriptors", descriptors, ScalarType::Int);
  check_contiguous(op, "descriptors", descriptors);
}

const LaneStreamDescriptor* descriptor_pointer(const Tensor& descriptors) {
  return static_cast<const LaneStreamDescriptor*>(descriptors.const_data_ptr());
}

std::tuple<Tensor, Tensor> measure_cuda(Tensor dense, std::vector<int64_t> plan_numbers) {
  constexpr const char* op = "lane_stream_measure";
  const LaneStreamPlan plan = plan_from(op, plan_numbers);
  check_dense(op, dense, plan);
  const torch::stable::accelerator::DeviceGuard guard(dense.get_device_index());
  const std::vector<int64_t> shape = {plan.streams(), plan.max_groups_per_stream()};
  Tensor group_rows = torch::stable::new_empty(dense, shape, ScalarType::Int);
  Tensor least_rows = torch::stable::new_empty(dense, shape, ScalarType::Int);
  check_launch(op, launch_lane_stream_measure(plan, static_cast<const uint16_t*>(dense.const_data_ptr()),
                                              static_cast<int32_t*>(group_rows.mutable_data_ptr()),
                                              static_cast<int32_t*>(least_rows.mutable_data_ptr()),
                                              current_stream(dense)));
  return {group_rows, least_rows};
}

Tensor encode_cuda(Tensor dense, Tensor group_rows, Tensor lines, int64_t data_bytes,
                   std::vector<int64_t> plan_numbers) {
  constexpr const char* op = "lane_stream_encode";
  const LaneStreamPlan plan = plan_from(op, plan_numbers);
  check_dense(op, dense, plan);
  for (const auto& [name, tensor] : {std::pair{"group_rows", &group_rows}, std::pair{"lines", &lines}}) {
    check_dim(op, name, *tensor, 2);
    check_size(op, name, *tensor, 0, plan.streams(), "streams of the plan");
    check_size(op, name, *tensor, 1, plan.max_groups_per_stream(), "most groups of a stream");
    check_dtype(op, name, *tensor, ScalarType::Int);
    check_contiguous(op, name, *tensor);
    check_same_device(op, name, *tensor, "dense", dense);
  }
  const torch::stable::accelerator::DeviceGuard guard(dense.get_device_index());
  const std::vector<int64_t> shape = {data_bytes};
  Tensor data = torch::stable::new_zeros(dense, shape, ScalarType::Byte);
  check_launch(op, launch_lane_stream_encode(plan, static_cast<const uint16_t*>(dense.const_data_ptr()),
                                             static_cast<const int32_t*>(group_rows.const_data_ptr()),
                                             static_cast<const int32_t*>(lines.const_data_ptr()),
                                             static_cast<uint8_t*>(data.mutable_data_ptr()), current_stream(dense)));
  return data;
}

void unpack_into_cuda(Tensor dense, Tensor data, Tensor descriptors, std::vector<int64_t> plan_numbers) {
  constexpr const char* op = "lane_stream_unpack_into";
  const LaneStreamPlan plan = plan_from(op, plan_numbers);
  check_dense(op, dense, plan);
  check_weight(op, data, descriptors, plan);
  check_same_device(op, "data", data, "dense", dense);
  check_same_device(op, "descriptors", descriptors, "dense", dense);
  const torch::stable::accelerator::DeviceGuard guard(dense.get_device_index());
  check_launch(op, launch_lane_stream_unpack(plan, static_cast<const uint8_t*>(data.const_data_ptr()),
                                             descriptor_pointer(descriptors),
                                             static_cast<uint16_t*>(dense.mutable_data_ptr()), current_stream(dense)));
}

Tensor linear_cuda(Tensor x, Tensor data, Tensor descriptors, std::optional<Tensor> bias, Tensor workspace,
                   std::vector<int64_t> plan_numbers, bool overlap_launch) {
  constexpr const char* op = "lane_stream_linear";
  const LaneStreamPlan plan = plan_from(op, plan_numbers);
  check_dim(op, "x", x, 2);
  check_size(op, "x", x, 1, plan.K, "K of the weight");
  check_contiguous(op, "x", x);
  const int64_t M = x.size(0);
  STD_TORCH_CHECK(M <= kMaxCallTokens, op, ": x has ", M, " rows, at most ", kMaxCallTokens, " are possible");
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Half || type == ScalarType::BFloat16, op,
                  ": x must be float16 or bfloat16, got ", toString(type));
  check_weight(op, data, descriptors, plan);
  check_same_device(op, "data", data, "x", x);
  check_same_device(op, "descriptors", descriptors, "x", x);
  check_same_device(op, "workspace", workspace, "x", x);
  check_dtype(op, "workspace", workspace, ScalarType::Byte);
  check_contiguous(op, "workspace", workspace);
  const int64_t workspace_bytes = lane_stream_workspace_bytes(plan, kMaxTokens);
  STD_TORCH_CHECK(workspace.numel() >= workspace_bytes, op, ": workspace has ", workspace.numel(),
                  " bytes, this weight needs ", workspace_bytes);
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
  const LaneStreamType kernel_type = type == ScalarType::Half ? LaneStreamType::kHalf : LaneStreamType::kBFloat16;
  const auto* rows_in = static_cast<const uint16_t*>(x.const_data_ptr());
  auto* rows_out = static_cast<uint16_t*>(y.mutable_data_ptr());
  const int64_t launch_tokens =
      M <= kMaxTokens ? kMaxTokens : lane_stream_launch_tokens(plan, workspace.numel());
  for (int64_t first = 0; first < M; first += launch_tokens) {
    const int64_t tokens = std::min(M - first, launch_tokens);
    const auto launch = tokens <= kMaxTokens ? launch_lane_stream_linear : launch_lane_stream_batch;
    check_launch(op, launch(plan, kernel_type, static_cast<const uint8_t*>(data.const_data_ptr()),
                            descriptor_pointer(descriptors), rows_in + first * plan.K, bias_pointer,
                            rows_out + first * plan.N, workspace.mutable_data_ptr(), tokens, overlap_launch,
                            current_stream(x)));
  }
  return y;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CUDA, m) {
  m.impl("lane_stream_measure", TORCH_BOX(&kernels::measure_cuda));
  m.impl("lane_stream_encode", TORCH_BOX(&kernels::encode_cuda));
  m.impl("lane_stream_unpack_into", TORCH_BOX(&kernels::unpack_into_cuda));
  m.impl("lane_stream_linear", TORCH_BOX(&kernels::linear_cuda));
}
