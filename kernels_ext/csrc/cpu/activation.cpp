// silu_mul for the CPU: checks and threads. The arithmetic is in activation.inl.

#include "decoder_ops.h"

namespace kernels {
namespace {

// About 4 us of exponentials on one core: waking a thread costs as much.
constexpr int64_t kElementsPerThread = 8 * 1024;

Tensor silu_mul(const Tensor& gate_up, int64_t isa) {
  constexpr const char* op = "silu_mul";
  const Dtype dtype = kernel_dtype(op, "gate_up", gate_up);
  const auto [T, F] = check_silu_mul(op, check_tensor, gate_up);
  const DecoderKernels& kernels = decoder_kernels(op, isa, dtype);
  Tensor y = empty_cpu({T, F}, gate_up.scalar_type());
  const void* from = gate_up.const_data_ptr();
  void* to = y.mutable_data_ptr();
  parallel_ranges(T * F, kElementsPerThread,
                  [&](int64_t begin, int64_t end) { kernels.silu_mul(from, to, F, begin, end); });
  return y;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CPU, m) { m.impl("silu_mul", TORCH_BOX(&kernels::silu_mul)); }
