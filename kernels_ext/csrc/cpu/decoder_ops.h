// What the bindings of the decoder ops share.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../decoder_checks.h"
#include "decoder_kernels.h"
#include "isa.h"
#include "tensors.h"

namespace kernels {

inline const DecoderKernels& decoder_kernels(const char* op, int64_t isa, Dtype dtype) {
  const int i = static_cast<int>(dtype);
  switch (resolve_isa(op, isa)) {
#if KERNELS_X86
    case Isa::kAvx512: return avx512::kDecoderKernels[i];
    case Isa::kAvx2: return avx2::kDecoderKernels[i];
#endif
    default: return generic::kDecoderKernels[i];
  }
}

// Calls f(begin, end) over [0, n) on torch's own threads, each call with at least `grain` of them; on the calling
// thread alone where there is less, which spares even the question how many threads there are.
template <class F>
void parallel_ranges(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  if (n <= grain) {
    f(int64_t{0}, n);
  } else {
    torch::stable::parallel_for(0, n, grain, f);
  }
}

// A contiguous CPU tensor of this dtype and number of dimensions.
inline void check_tensor(const char* op, const char* name, const Tensor& t, ScalarType dtype, int64_t dim) {
  KERNELS_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU, like the first argument");
  check_dtype(op, name, t, dtype);
  check_dim(op, name, t, dim);
  check_contiguous(op, name, t);
}

}  // namespace kernels
