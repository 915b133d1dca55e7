// Rotary embedding of q and k and the write of k and v into the paged cache, compiled per instruction set (see vec.h).
//
// rotate_half convention: with h = rotary_dim / 2,
//   out[i]     = x[i]     * cos[i]     - x[i + h] * sin[i]
//   out[i + h] = x[i + h] * cos[i + h] + x[i]     * sin[i + h]        i < h
// in float32, rounded once. Where a head norm is given, x is the normed head, rounded as rms_norm rounds it.

namespace kernels::KERNELS_ISA {

// One head; norm_weight may be null.
template <class T>
void rope_head(const T* x, const T* norm_weight, const float* cos, const float* sin, T* out, const RopeArgs& a) {
  const int64_t half = a.rotary_dim / 2;
  float norm_scale = 1.0f;
  if (norm_weight != nullptr) {
    VecF squares{};
    for_vectors(a.head_dim, [&](int64_t i, int64_t count) KERNELS_LAMBDA {
      const VecF v = load(x + i, count);
      squares += v * v;
    });
    norm_scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(a.head_dim) + a.eps);
  }
  const auto element = [&](int64_t i, int64_t count) KERNELS_LAMBDA -> VecF {
    const VecF v = load(x + i, count);
    if (norm_weight == nullptr) return v;
    return round_to<T>(load(norm_weight + i, count) * round_to<T>(v * norm_scale));
  };
  for_vectors(half, [&](int64_t i, int64_t count) KERNELS_LAMBDA {
    const VecF low = element(i, count);
    const VecF high = element(i + half, count);
    store(out + i, low * load(cos + i, count) - high * load(sin + i, count), count);
    store(out + i + half, high * load(cos + i + half, count) + low * load(sin + i + half, count), count);
  });
  for_vectors(a.head_dim - a.rotary_dim, [&](int64_t i, int64_t count) KERNELS_LAMBDA {
    store(out + a.rotary_dim + i, element(a.rotary_dim + i, count), count);
  });
}

template <class T>
void rope_kv_write(const RopeArgs& a, int64_t begin, int64_t end) {
  const int64_t D = a.head_dim;
  const int64_t kv_width = a.num_kv_heads * D;
  for (int64_t t = begin; t < end; ++t) {
    const T* q_in = static_cast<const T*>(a.qkv) + t * (a.num_heads * D + 2 * kv_width);
    const T* k_in = q_in + a.num_heads * D;
    const T* v_in = k_in + kv_width;
    T* q_out = static_cast<T*>(a.q) + t * a.num_heads * D;
    T* k_out = static_cast<T*>(a.k_cache) + a.slots[t] * kv_width;
    T* v_out = static_cast<T*>(a.v_cache) + a.slots[t] * kv_width;
    const float* cos = a.cos + a.positions[t] * a.rotary_dim;
    const float* sin = a.sin + a.positions[t] * a.rotary_dim;
    for (int64_t h = 0; h < a.num_heads; ++h) {
      rope_head(q_in + h * D, static_cast<const T*>(a.q_norm_weight), cos, sin, q_out + h * D, a);
    }
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      rope_head(k_in + h * D, static_cast<const T*>(a.k_norm_weight), cos, sin, k_out + h * D, a);
    }
    __builtin_memcpy(v_out, v_in, static_cast<size_t>(kv_width) * sizeof(T));
  }
}

}  // namespace kernels::KERNELS_ISA
