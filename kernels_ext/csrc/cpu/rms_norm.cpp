// rms_norm and add_rms_norm for the CPU: checks and threads. The arithmetic is in rms_norm.inl.

#include "decoder_ops.h"

namespace kernels {
namespace {

// About 3 us of work on one core: waking a thread costs as much.
constexpr int64_t kElementsPerThread = 16 * 1024;

Tensor norm(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, int64_t isa) {
  const Dtype dtype = kernel_dtype(op, "x", x);
  const auto [T, H] = check_rms_norm(op, check_tensor, x, residual, weight);
  const DecoderKernels& kernels = decoder_kernels(op, isa, dtype);
  Tensor y = empty_cpu({T, H}, x.scalar_type());
  const RmsNormArgs args = {
      .x = x.const_data_ptr(),
      .residual = residual != nullptr ? residual->mutable_data_ptr() : nullptr,
      .weight = weight.const_data_ptr(),
      .y = y.mutable_data_ptr(),
      .H = H,
      .eps = static_cast<float>(eps),
  };
  parallel_ranges(T, (kElementsPerThread + H - 1) / H,
                  [&](int64_t begin, int64_t end) { kernels.rms_norm(args, begin, end); });
  return y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, int64_t isa) {
  return norm("rms_norm", x, nullptr, weight, eps, isa);
}

Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, int64_t isa) {
  return norm("add_rms_norm", x, &residual, weight, eps, isa);
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&kernels::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&kernels::add_rms_norm));
}
