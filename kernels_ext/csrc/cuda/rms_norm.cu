// Root-mean-square norm, alone and after adding to the residual stream, sm_80 and newer.
//
//   residual = round(residual + x);  y = round(weight * round(residual / sqrt(mean(residual^2) + eps)))
//
// Work:     one block a row. A thread takes vectors of 16 bytes where H and the addresses allow, single elements
//           otherwise, and keeps the first kKept of them in registers between the two passes.
// Memory:   x, residual and weight read once (wider rows than the registers hold are read twice), y written once.
// Limits:   any T, H >= 1.
// Bound by: latency: two dependent reads and one reduction. A row's result does not depend on the other rows.
// Source:   the order of roundings is that of transformers' LlamaRMSNorm.
// Tests:    tests/kernels/test_decoder_ops_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "decoder.cuh"
#include "element.cuh"
#include "launch.cuh"

#include <algorithm>

namespace kernels {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kKept = 2;

// The block's sum, in every thread.
__device__ float block_sum(float v, float* warp_sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) warp_sums[warp] = v;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += warp_sums[w];
  return total;
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(RmsNormArguments a) {
  using Elements = Vector<T, kVector>;
  __shared__ float warp_sums[kMaxThreads / 32];
  begin_dependent();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * a.H;
  const T* x = static_cast<const T*>(a.x) + row;
  T* residual = a.residual == nullptr ? nullptr : static_cast<T*>(a.residual) + row;
  const T* weight = static_cast<const T*>(a.weight);
  T* y = static_cast<T*>(a.y) + row;
  const int64_t vectors = a.H / kVector;

  // What is normed: x, or the updated residual.
  const auto at = [](auto* base, int64_t vector) { return base + vector * kVector; };
  const auto add = [&](int64_t vector, float& squares) {
    Elements v = *reinterpret_cast<const Elements*>(at(x, vector));
    if (residual != nullptr) {
      const Elements r = *reinterpret_cast<const Elements*>(at(residual, vector));
#pragma unroll
      for (int e = 0; e < kVector; ++e) v.element[e] = from_float<T>(to_float(r.element[e]) + to_float(v.element[e]));
      *reinterpret_cast<Elements*>(at(residual, vector)) = v;
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) squares += to_float(v.element[e]) * to_float(v.element[e]);
    return v;
  };
  Elements kept[kKept] = {};
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int64_t vector = threadIdx.x + static_cast<int64_t>(i) * blockDim.x;
    if (vector < vectors) kept[i] = add(vector, squares);
  }
  for (int64_t vector = threadIdx.x + int64_t{kKept} * blockDim.x; vector < vectors; vector += blockDim.x) {
    add(vector, squares);
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, warp_sums) / static_cast<float>(a.H) + a.eps);

  const auto norm = [&](int64_t vector, Elements v) {
    const Elements w = *reinterpret_cast<const Elements*>(at(weight, vector));
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      v.element[e] = from_float<T>(to_float(w.element[e]) * round_to<T>(to_float(v.element[e]) * scale));
    }
    *reinterpret_cast<Elements*>(at(y, vector)) = v;
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int64_t vector = threadIdx.x + static_cast<int64_t>(i) * blockDim.x;
    if (vector < vectors) norm(vector, kept[i]);
  }
  // A thread reads back what it stored itself.
  const T* normed = residual == nullptr ? x : residual;
  for (int64_t vector = threadIdx.x + int64_t{kKept} * blockDim.x; vector < vectors; vector += blockDim.x) {
    norm(vector, *reinterpret_cast<const Elements*>(at(normed, vector)));
  }
}

template <typename T>
cudaError_t launch(const RmsNormArguments& a, cudaStream_t stream) {
  constexpr int kVector = kVectorElements<T>;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool vectors = a.H % kVector == 0 && aligned(a.x) && aligned(a.residual) && aligned(a.weight) && aligned(a.y);
  const int64_t items = vectors ? a.H / kVector : a.H;
  const auto threads = static_cast<unsigned>(std::min<int64_t>((items + 31) / 32 * 32, kMaxThreads));
  return launch_overlapped(vectors ? rms_norm_kernel<T, kVector> : rms_norm_kernel<T, 1>,
                           dim3(static_cast<unsigned>(a.T)), dim3(threads), 0, stream, a);
}

}  // namespace

cudaError_t launch_rms_norm(ElementType type, const RmsNormArguments& arguments, cudaStream_t stream) {
  if (arguments.T == 0) return cudaSuccess;
  switch (type) {
    case ElementType::kFloat32:
      return launch<float>(arguments, stream);
    case ElementType::kFloat16:
      return launch<__half>(arguments, stream);
    case ElementType::kBFloat16:
      return launch<__nv_bfloat16>(arguments, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kernels
