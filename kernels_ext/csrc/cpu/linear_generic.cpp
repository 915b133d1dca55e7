// The linear kernels in plain C++, for processors without AVX2. linear_core.h says what is defined here.

#include <cstdint>

#include "scalar.h"

namespace kernels {
namespace {

constexpr int kLanes = 8;
constexpr int64_t kOverread = 0;  // plain loops read what is there and no more

// Eight floats that a compiler can keep in two SSE or NEON registers.
struct Vec {
  float lane[kLanes];
};

constexpr int rows_for_tile(int tokens) { return tokens <= 2 ? 2 : 1; }

inline Vec zero() { return {}; }

inline Vec load(const float* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v.lane[i] = p[i];
  return v;
}

inline void store(float* p, const Vec& v) {
  for (int i = 0; i < kLanes; ++i) p[i] = v.lane[i];
}

inline Vec multiply_add(const Vec& a, const Vec& b, const Vec& c) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
  return v;
}

// Pairwise, as the vector versions do it.
inline float sum(const Vec& v) {
  const float low = (v.lane[0] + v.lane[4]) + (v.lane[2] + v.lane[6]);
  const float high = (v.lane[1] + v.lane[5]) + (v.lane[3] + v.lane[7]);
  return low + high;
}

template <class T>
struct Element {
  static constexpr int kColumns = kLanes;
  static constexpr int kVecs = 1;

  static void dense(const T* p, Vec* v) {
    for (int i = 0; i < kLanes; ++i) v->lane[i] = to_float(p[i]);
  }

  static uint64_t select(uint64_t block, int c) { return block >> c & 0xff; }

  static void expand(const T* values, uint64_t bits, Vec* v) {
    for (int i = 0; i < kLanes; ++i) {
      const bool present = bits >> i & 1;
      v->lane[i] = present ? to_float(*values) : 0.0f;
      values += present;
    }
  }
};

template <class Word>
struct Raw {
  static constexpr int kColumns = 8;

  static uint64_t select(uint64_t block, int c) { return block >> c & 0xff; }

  static void expand(const Word* values, uint64_t bits, Word* out) {
    for (int i = 0; i < kColumns; ++i) {
      const bool present = bits >> i & 1;
      out[i] = present ? *values : Word{0};
      values += present;
    }
  }

  static uint64_t nonzeros(const Word* in) {
    uint64_t bits = 0;
    for (int i = 0; i < kColumns; ++i) bits |= static_cast<uint64_t>(in[i] != 0) << i;
    return bits;
  }

  static void compress(const Word* in, uint64_t bits, Word* out) {
    for (int i = 0; i < kColumns; ++i) {
      if (bits >> i & 1) *out++ = in[i];
    }
  }
};

}  // namespace
}  // namespace kernels

#include "linear_core.h"

namespace kernels {

const LinearKernels& generic_linear_kernels() { return kLinearKernels; }

}  // namespace kernels
