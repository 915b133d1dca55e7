// Root-mean-square norm over the last dimension, compiled per instruction set (see vec.h).
//
//   y = round(weight * round(x / sqrt(mean(x^2) + eps)))        round: to the tensors' dtype
//
// The order of roundings is transformers' LlamaRMSNorm's: the normalised value is rounded before it meets the weight.
// The sum of squares runs over the lanes of one vector and then over their pairs: the same for a row in any batch.

namespace kernels::KERNELS_ISA {

template <class T>
void rms_norm(const RmsNormArgs& a, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(a.x) + t * a.H;
    T* y = static_cast<T*>(a.y) + t * a.H;
    VecF squares{};
    if (a.residual != nullptr) {
      T* residual = static_cast<T*>(a.residual) + t * a.H;
      for_vectors(a.H, [&](int64_t i, int64_t count) KERNELS_LAMBDA {
        const VecF sum = round_to<T>(load(residual + i, count) + load(x + i, count));
        store(residual + i, sum, count);
        squares += sum * sum;
      });
      x = residual;
    } else {
      for_vectors(a.H, [&](int64_t i, int64_t count) KERNELS_LAMBDA {
        const VecF v = load(x + i, count);
        squares += v * v;
      });
    }
    const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(a.H) + a.eps);
    for_vectors(a.H, [&](int64_t i, int64_t count) KERNELS_LAMBDA {
      store(y + i, load(weight + i, count) * round_to<T>(load(x + i, count) * scale), count);
    });
  }
}

}  // namespace kernels::KERNELS_ISA
