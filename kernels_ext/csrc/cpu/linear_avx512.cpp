// The linear kernels in AVX-512 (F, BW, VL, DQ, VBMI2). linear_core.h says what is defined here.
//
// vpexpandw and vpexpandd put packed values where the bits of a mask are set and zeros elsewhere: 32 or 16
// elements an instruction. They take their input from a register, never from memory: with a memory operand
// they are microcoded on Zen 4, and so is vpcompress to memory.

#include <immintrin.h>

#include <cstdint>

#include "scalar.h"

namespace kernels {
namespace {

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int64_t kOverread = 32;  // expand loads a whole register wherever the row's values stop

// 32 registers: R * tokens sums, and 2 R decoded vectors, and x.
constexpr int rows_for_tile(int tokens) { return tokens <= 4 ? 4 : 2; }

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }

inline __m512i expand16(const void* values, uint64_t bits) {
  return _mm512_maskz_expand_epi16(static_cast<__mmask32>(bits), _mm512_loadu_si512(values));
}

inline __m512i expand32(const void* values, uint64_t bits) {
  return _mm512_maskz_expand_epi32(static_cast<__mmask16>(bits), _mm512_loadu_si512(values));
}

template <class T>
struct Element;

// bf16 becomes fp32 by moving to the high half of a 32-bit lane. Even columns are shifted there, odd columns
// are there already, so a step gives the 16 even columns and then the 16 odd ones, with no shuffle.
template <>
struct Element<BFloat16> {
  static constexpr int kColumns = 32;
  static constexpr int kVecs = 2;

  static void even_odd(__m512i pairs, Vec* v) {
    v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    v[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  static uint64_t select(uint64_t block, int c) { return static_cast<uint32_t>(block >> c); }
  static void dense(const BFloat16* p, Vec* v) { even_odd(_mm512_loadu_si512(p), v); }
  static void expand(const BFloat16* values, uint64_t bits, Vec* v) { even_odd(expand16(values, bits), v); }
};

template <>
struct Element<Float16> {
  static constexpr int kColumns = 32;
  static constexpr int kVecs = 2;

  static void widen(__m512i halves, Vec* v) {
    v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    v[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }

  static uint64_t select(uint64_t block, int c) { return static_cast<uint32_t>(block >> c); }
  static void dense(const Float16* p, Vec* v) { widen(_mm512_loadu_si512(p), v); }
  static void expand(const Float16* values, uint64_t bits, Vec* v) { widen(expand16(values, bits), v); }
};

template <>
struct Element<float> {
  static constexpr int kColumns = 16;
  static constexpr int kVecs = 1;

  static uint64_t select(uint64_t block, int c) { return static_cast<uint16_t>(block >> c); }
  static void dense(const float* p, Vec* v) { *v = load(p); }
  static void expand(const float* values, uint64_t bits, Vec* v) { *v = _mm512_castsi512_ps(expand32(values, bits)); }
};

template <class Word>
struct Raw;

template <>
struct Raw<uint16_t> {
  static constexpr int kColumns = 32;

  static uint64_t select(uint64_t block, int c) { return static_cast<uint32_t>(block >> c); }

  static void expand(const uint16_t* values, uint64_t bits, uint16_t* out) {
    _mm512_storeu_si512(out, expand16(values, bits));
  }

  static uint64_t nonzeros(const uint16_t* in) {
    const __m512i words = _mm512_loadu_si512(in);
    return _mm512_test_epi16_mask(words, words);
  }

  static void compress(const uint16_t* in, uint64_t bits, uint16_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi16(static_cast<__mmask32>(bits), _mm512_loadu_si512(in)));
  }
};

template <>
struct Raw<uint32_t> {
  static constexpr int kColumns = 16;

  static uint64_t select(uint64_t block, int c) { return static_cast<uint16_t>(block >> c); }

  static void expand(const uint32_t* values, uint64_t bits, uint32_t* out) {
    _mm512_storeu_si512(out, expand32(values, bits));
  }

  static uint64_t nonzeros(const uint32_t* in) {
    const __m512i words = _mm512_loadu_si512(in);
    return _mm512_test_epi32_mask(words, words);
  }

  static void compress(const uint32_t* in, uint64_t bits, uint32_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), _mm512_loadu_si512(in)));
  }
};

}  // namespace
}  // namespace kernels

#include "linear_core.h"

namespace kernels {

const LinearKernels& avx512_linear_kernels() { return kLinearKernels; }

}  // namespace kernels
