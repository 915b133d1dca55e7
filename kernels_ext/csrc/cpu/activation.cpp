// silu_mul for the CPU: checks and threads. The arithmetic is in activation.inl.

#include "decoder_ops.h"

namespace kernels {
namespace {

// About 4 us of exponentials on one core: waking a thread costs as much.
constexpr int64_t kElementsPerThread = 8 * 1024;

Tensor silu_mul(const Tensor& gate_up, int64_t isa) {
  constexpr const char* op = "silu_mul";
  const Dtype dtype = kernel_dtype(op, "gate_up", gate_up);
  const ScalarType type = gate_up.scalar_type();
  check_tensor(op, "gate_up", gate_up, type, 2);
  KERNELS_CHECK(gate_up.size(1) % 2 == 0, op, ": gate_up must have an even number of columns, got shape ",
                  shape_string(gate_up));
  const int64_t T = gate_up.size(0);
  const int64_t F = gate_up.size(1) / 2;
  const DecoderKernels& kernels = decoder_kernels(op, isa, dtype);
  Tensor y = empty_cpu({T, F}, type);
  const void* from = gate_up.const_data_ptr();
  void* to = y.mutable_data_ptr();
  parallel_ranges(T * F, kElementsPerThread,
                  [&](int64_t begin, int64_t end) { kernels.silu_mul(from, to, F, begin, end); });
  return y;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CPU, m) { m.impl("silu_mul", TORCH_BOX(&kernels::silu_mul)); }
