// Gated SiLU, compiled per instruction set (see vec.h).
//
//   y = round(round(g / (1 + e^-g)) * u)        gate_up row = g | u
//
// The activation is rounded to the tensors' dtype before the product, as when a framework runs the two one by one.

namespace kernels::KERNELS_ISA {

template <class T>
void silu_mul(const void* gate_up, void* y, int64_t F, int64_t begin, int64_t end) {
  for (int64_t t = begin / F; t * F < end; ++t) {
    const int64_t first = begin > t * F ? begin - t * F : 0;
    const int64_t last = end < (t + 1) * F ? end - t * F : F;
    const T* gate = static_cast<const T*>(gate_up) + t * 2 * F + first;
    const T* up = gate + F;
    T* out = static_cast<T*>(y) + t * F + first;
    for_vectors(last - first, [&](int64_t i, int64_t count) KERNELS_LAMBDA {
      const VecF g = load(gate + i, count);
      const VecF silu = round_to<T>(g / (exp(-g) + 1.0f));
      store(out + i, silu * load(up + i, count), count);
    });
  }
}

}  // namespace kernels::KERNELS_ISA
