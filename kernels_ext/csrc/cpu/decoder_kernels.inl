// The body of decoder_generic.cpp, decoder_avx2.cpp and decoder_avx512.cpp, which define KERNELS_ISA.

#include "vec.h"

// GCC and Clang take the attribute of a lambda's call operator here.
#define KERNELS_LAMBDA __attribute__((always_inline))

#include "activation.inl"
#include "attention.inl"
#include "rms_norm.inl"
#include "rope.inl"

namespace kernels::KERNELS_ISA {

template <class T>
constexpr DecoderKernels decoder_kernels_for() {
  return {&rms_norm<T>,       &rope_kv_write<T>,      &silu_mul<T>,
          &attention_tile<T>, &attention_partition<T>, &attention_merge<T>};
}

const DecoderKernels kDecoderKernels[kNumDtypes] = {decoder_kernels_for<float>(), decoder_kernels_for<BFloat16>(),
                                                    decoder_kernels_for<Float16>()};

}  // namespace kernels::KERNELS_ISA
