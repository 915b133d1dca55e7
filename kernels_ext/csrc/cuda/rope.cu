// Rotary embedding of queries and keys, and the write of keys and values into the paged cache, sm_80 and newer.
//
// rotate_half convention: with h = rotary_dim / 2,
//   out[i]     = x[i]     * cos[i]     - x[i + h] * sin[i]
//   out[i + h] = x[i + h] * cos[i + h] + x[i]     * sin[i + h]        i < h
// in fp32, rounded once. Where a head norm is given, x is the normed head, rounded as rms_norm rounds it.
//
// Work:     one warp a head of a token: query, key or value.
// Memory:   qkv read once (twice from L1 where heads are normed), q and the tokens' cache rows written once.
// Limits:   any T and head size; rotary_dim even.
// Bound by: latency at decode sizes.
// Tests:    tests/kernels/test_decoder_ops_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "decoder.cuh"
#include "element.cuh"
#include "launch.cuh"

namespace kernels {
namespace {

constexpr int kWarps = 4;

template <typename T>
__device__ void rope_head(const RopeArguments& a, const T* x, const T* norm_weight, int64_t position, T* out,
                          int lane) {
  float scale = 1.0f;
  if (norm_weight != nullptr) {
    float squares = 0.0f;
    for (int i = lane; i < a.head_dim; i += 32) squares += to_float(x[i]) * to_float(x[i]);
    scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(a.head_dim) + a.eps);
  }
  const auto element = [&](int i) {
    const float v = to_float(x[i]);
    return norm_weight == nullptr ? v : round_to<T>(to_float(norm_weight[i]) * round_to<T>(v * scale));
  };
  const float* cos = a.cos + position * a.rotary_dim;
  const float* sin = a.sin + position * a.rotary_dim;
  const int half = a.rotary_dim / 2;
  // A head has few pairs a lane: unrolled further, the loop needs more registers than it gains time.
#pragma unroll 2
  for (int i = lane; i < half; i += 32) {
    const float low = element(i);
    const float high = element(i + half);
    out[i] = from_float<T>(low * cos[i] - high * sin[i]);
    out[i + half] = from_float<T>(high * cos[i + half] + low * sin[i + half]);
  }
  for (int i = a.rotary_dim + lane; i < a.head_dim; i += 32) out[i] = from_float<T>(element(i));
}

template <typename T>
__global__ void __launch_bounds__(kWarps * 32) rope_kv_write_kernel(RopeArguments a) {
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int heads = a.num_heads + 2 * a.num_kv_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= a.T * heads) return;
  const int64_t token = item / heads;
  int head = static_cast<int>(item % heads);
  const int64_t D = a.head_dim;
  const T* x = static_cast<const T*>(a.qkv) + item * D;
  if (head < a.num_heads) {
    T* out = static_cast<T*>(a.q) + (token * a.num_heads + head) * D;
    rope_head(a, x, static_cast<const T*>(a.q_norm_weight), a.positions[token], out, lane);
    return;
  }
  head -= a.num_heads;
  const int64_t row = a.slots[token] * a.num_kv_heads;
  if (head < a.num_kv_heads) {
    T* out = static_cast<T*>(a.k_cache) + (row + head) * D;
    rope_head(a, x, static_cast<const T*>(a.k_norm_weight), a.positions[token], out, lane);
    return;
  }
  T* out = static_cast<T*>(a.v_cache) + (row + head - a.num_kv_heads) * D;
  for (int i = lane; i < D; i += 32) out[i] = x[i];
}

template <typename T>
cudaError_t launch(const RopeArguments& a, cudaStream_t stream) {
  const int64_t items = a.T * (a.num_heads + 2 * a.num_kv_heads);
  return launch_overlapped(rope_kv_write_kernel<T>, dim3(static_cast<unsigned>((items + kWarps - 1) / kWarps)),
                           dim3(kWarps * 32), 0, stream, a);
}

}  // namespace

cudaError_t launch_rope_kv_write(ElementType type, const RopeArguments& arguments, cudaStream_t stream) {
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
