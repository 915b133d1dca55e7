// Small helpers of the CPU ops' bindings.
#pragma once

#include <initializer_list>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../checks.h"
#include "scalar.h"

namespace kernels {

// An uninitialised contiguous CPU tensor. Asks the allocator directly; torch::stable::empty goes through the
// dispatcher, which costs more than a small kernel does.
inline Tensor empty_cpu(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  int64_t size[8];
  int64_t stride[8];
  const int64_t dim = static_cast<int64_t>(sizes.size());
  STD_TORCH_CHECK(dim <= 8, "empty_cpu: at most 8 dimensions");
  int64_t i = 0;
  for (const int64_t s : sizes) size[i++] = s;
  int64_t step = 1;
  for (i = dim - 1; i >= 0; --i) {
    stride[i] = step;
    step *= size[i] > 0 ? size[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dim, size, stride, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// The kernels' name for a tensor's dtype; throws for one that they don't take.
inline Dtype kernel_dtype(const char* op, const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    default:
      throw_value_error(op, ": ", name, " must be float32, bfloat16 or float16, got ", toString(t.scalar_type()));
  }
}

}  // namespace kernels
