// CUDA implementation of the bitmap ops declared in csrc/schema.cpp, and the Python module _C_cuda.
#include "../checks.h"
#include "../module_init.h"
#include "binding.h"
#include "bitmap_unpack.cuh"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

KERNELS_EMPTY_PYTHON_MODULE(_C_cuda)

namespace kernels {
namespace {

int element_bytes(const char* op, const Tensor& values) {
  switch (values.scalar_type()) {
    case ScalarType::Float:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      STD_TORCH_CHECK(false, op, ": values must be float32, float16 or bfloat16, got ", toString(values.scalar_type()));
  }
}

// `isa` chooses among processors' instruction sets and means nothing here; the schema is shared with the CPU.
void bitmap_unpack_into_cuda(Tensor dense, Tensor bitmap, Tensor values, Tensor row_offsets, int64_t /*isa*/) {
  constexpr const char* op = "bitmap_unpack_into";
  check_dim(op, "dense", dense, 2);
  check_dim(op, "bitmap", bitmap, 2);
  check_dim(op, "values", values, 1);
  check_dim(op, "row_offsets", row_offsets, 1);
  const int64_t N = dense.size(0), K = dense.size(1);
  check_size(op, "bitmap", bitmap, 0, N, "N of dense");
  check_size(op, "bitmap", bitmap, 1, (K + 7) / 8, "ceil(K / 8) of dense");
  check_size(op, "row_offsets", row_offsets, 0, N + 1, "N + 1 of dense");
  check_dtype(op, "bitmap", bitmap, ScalarType::Byte);
  check_dtype(op, "row_offsets", row_offsets, ScalarType::Long);
  check_dtype(op, "dense", dense, values.scalar_type());
  for (const auto& [name, tensor] : {std::pair{"dense", &dense}, std::pair{"bitmap", &bitmap},
                                     std::pair{"values", &values}, std::pair{"row_offsets", &row_offsets}}) {
    check_contiguous(op, name, *tensor);
    check_same_device(op, name, *tensor, "dense", dense);
  }
  const torch::stable::accelerator::DeviceGuard guard(dense.get_device_index());
  check_launch(op, launch_bitmap_unpack(static_cast<const uint8_t*>(bitmap.const_data_ptr()), values.const_data_ptr(),
                                        static_cast<const int64_t*>(row_offsets.const_data_ptr()),
                                        dense.mutable_data_ptr(), N, K, element_bytes(op, values),
                                        current_stream(dense)));
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CUDA, m) {
  m.impl("bitmap_unpack_into", TORCH_BOX(&kernels::bitmap_unpack_into_cuda));
}
