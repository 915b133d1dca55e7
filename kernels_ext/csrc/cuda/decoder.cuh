// Host entries of the decoder kernels (rms_norm.cu, rope.cu, activation.cu, attention.cu). No torch header: raw device
// pointers and a stream in, cudaError_t out. kernels_ext/decoder_ops.py documents each op; letters are its letters.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace kernels {

enum class ElementType { kFloat32, kFloat16, kBFloat16 };

// x, residual, y [T, H]; residual may be null.
struct RmsNormArguments {
  const void* x;
  void* residual;
  const void* weight;
  void* y;
  int64_t T, H;
  float eps;
};
cudaError_t launch_rms_norm(ElementType type, const RmsNormArguments& arguments, cudaStream_t stream);

// gate_up [T, 2 * F], y [T, F].
cudaError_t launch_silu_mul(ElementType type, const void* gate_up, void* y, int64_t T, int64_t F, cudaStream_t stream);

// qkv [T, (Hq + 2 * Hkv) * D], q [T, Hq, D], caches [slots, Hkv, D]; norm weights may be null.
struct RopeArguments {
  const void* qkv;
  const float* cos;
  const float* sin;
  const int64_t* positions;
  const int64_t* slots;
  void* q;
  void* k_cache;
  void* v_cache;
  const void* q_norm_weight;
  const void* k_norm_weight;
  int64_t T;
  int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
  float eps;
};
cudaError_t launch_rope_kv_write(ElementType type, const RopeArguments& arguments, cudaStream_t stream);

struct AttentionArguments {
  const void* q;             // [T, Hq, D]
  const void* k_cache;       // [blocks, block_size, Hkv, D]
  const void* v_cache;
  const int32_t* block_tables;  // [S, max_blocks]
  const int32_t* query_start;   // [S + 1]
  const int32_t* context_lens;  // [S]
  void* out;                 // [T, Hq * D]
  float* workspace;          // attention_workspace_floats() of them; null where that is 0
  int64_t T;
  int32_t S, max_blocks, block_size, num_heads, num_kv_heads, head_dim;
  int32_t window;            // positions that a token sees; INT32_MAX for all
  float scale;
};
// Head sizes above this have no kernel.
constexpr int32_t kMaxHeadDim = 512;
// Floats of workspace for a call of these sizes; the pointers are not used.
cudaError_t attention_workspace_floats(ElementType type, const AttentionArguments& arguments, int64_t* floats);
cudaError_t launch_paged_attention(ElementType type, const AttentionArguments& arguments, cudaStream_t stream);

}  // namespace kernels
