// Gated SiLU, sm_80 and newer.
//
//   y = round(round(g / (1 + e^-g)) * u)        gate_up row = g | u
//
// Work:     one thread a vector of 16 bytes where F and the addresses allow, else one element.
// Limits:   any T, F >= 0.
// Bound by: reads and writes; at decode sizes by launch latency.
// Tests:    tests/kernels/test_decoder_ops_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "decoder.cuh"
#include "element.cuh"
#include "launch.cuh"

namespace kernels {
namespace {

constexpr int kThreads = 256;

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads)
    silu_mul_kernel(const void* gate_up, void* y, int64_t row_vectors, int64_t total_vectors) {
  using Elements = Vector<T, kVector>;
  begin_dependent();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= total_vectors) return;
  const int64_t row = i / row_vectors;
  const Elements* gate = static_cast<const Elements*>(gate_up) + row * row_vectors + i;
  const Elements g = *gate;
  const Elements u = gate[row_vectors];
  Elements out;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const float v = to_float(g.element[e]);
    out.element[e] = from_float<T>(round_to<T>(v / (1.0f + expf(-v))) * to_float(u.element[e]));
  }
  static_cast<Elements*>(y)[i] = out;
}

template <typename T>
cudaError_t launch(const void* gate_up, void* y, int64_t T_, int64_t F, cudaStream_t stream) {
  constexpr int kVector = kVectorElements<T>;
  const bool vectors = F % kVector == 0 && reinterpret_cast<uintptr_t>(gate_up) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(y) % 16 == 0;
  const int64_t row = vectors ? F / kVector : F;
  const int64_t total = T_ * row;
  return launch_overlapped(vectors ? silu_mul_kernel<T, kVector> : silu_mul_kernel<T, 1>,
                           dim3(static_cast<unsigned>((total + kThreads - 1) / kThreads)), dim3(kThreads), 0, stream,
                           gate_up, y, row, total);
}

}  // namespace

cudaError_t launch_silu_mul(ElementType type, const void* gate_up, void* y, int64_t T, int64_t F, cudaStream_t stream) {
  if (T * F == 0) return cudaSuccess;
  switch (type) {
    case ElementType::kFloat32:
      return launch<float>(gate_up, y, T, F, stream);
    case ElementType::kFloat16:
      return launch<__half>(gate_up, y, T, F, stream);
    case ElementType::kBFloat16:
      return launch<__nv_bfloat16>(gate_up, y, T, F, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kernels
