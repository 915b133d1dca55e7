// One SIMD vector of floats, in the width of the instruction set this file is compiled for.
//
// Included only by the per-ISA files (decoder_generic.cpp, decoder_avx2.cpp, decoder_avx512.cpp), each of which
// defines KERNELS_ISA, so that every instantiation lives in a namespace of its own: the linker must never
// fold an AVX-512 copy of a function into the generic code. For the same reason nothing here calls an inline
// function of the standard library.
//
// Arithmetic is written with the compilers' vector extensions (GCC >= 12, Clang >= 16). Only the float16 conversions
// need intrinsics. Where the target has FMA the compiler contracts `a * b + c` into it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "decoder_kernels.h"
#include "scalar.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace kernels::KERNELS_ISA {

#if defined(__AVX512F__)
inline constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int64_t kLanes = 8;
#else
inline constexpr int64_t kLanes = 4;
#endif

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

#define KERNELS_INLINE inline __attribute__((always_inline))

inline constexpr float kInfinity = __builtin_inff();

KERNELS_INLINE VecF broadcast(float x) { return VecF{} + x; }

KERNELS_INLINE VecI lane_index() {
#if defined(__AVX512F__)
  return VecI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
  return VecI{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return VecI{0, 1, 2, 3};
#endif
}

// ---- bfloat16 and float16 bits <-> float ----

KERNELS_INLINE VecF bf16_to_float(VecH bits) { return (VecF)(__builtin_convertvector(bits, VecU) << 16); }

// Round to nearest even. NaN becomes the quiet NaN 0x7fc0, as in torch: adding the rounding bias could carry a
// NaN's payload into infinity.
KERNELS_INLINE VecU float_to_bf16_bits(VecF x) {
  const VecU u = (VecU)x;
  const VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (x == x) ? rounded : (VecU{} + 0x7fc0u);
}

#if defined(__AVX512F__)
// The zero-masked forms, with every lane on, because GCC 12 warns that the plain ones use an uninitialised register.
KERNELS_INLINE VecF fp16_to_float(VecH bits) { return (VecF)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
KERNELS_INLINE VecH float_to_fp16(VecF x) {
  return (VecH)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
KERNELS_INLINE VecF fp16_to_float(VecH bits) { return (VecF)_mm256_cvtph_ps((__m128i)bits); }
KERNELS_INLINE VecH float_to_fp16(VecF x) {
  return (VecH)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// The exponent is rebased by a multiplication with 2^112 (127 - 15), which also normalises subnormals exactly.
// Infinity and NaN (exponent field all ones) get their float exponent back by hand.
KERNELS_INLINE VecF fp16_to_float(VecH bits) {
  const VecU h = __builtin_convertvector(bits, VecU);
  const VecU sign = (h & 0x8000u) << 16;
  const VecU magnitude = h & 0x7fffu;
  const VecU scaled = (VecU)((VecF)(magnitude << 13) * 0x1p112f);
  const VecU special = (magnitude << 13) | 0x7f800000u;
  return (VecF)(sign | ((magnitude >= 0x7c00u) ? special : scaled));
}
// Round to nearest even. Normal results round by adding half a unit (minus the tie-break) to the bits; subnormal
// results round in a float addition whose unit in the last place is 2^-24, the smallest float16.
KERNELS_INLINE VecH float_to_fp16(VecF x) {
  const VecU u = (VecU)x;
  const VecU sign = (u >> 16) & 0x8000u;
  const VecU magnitude = u & 0x7fffffffu;
  const VecU normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const VecU subnormal = (VecU)((VecF)magnitude + 0.5f) - 0x3f000000u;
  VecU h = (magnitude < (113u << 23)) ? subnormal : normal;
  h = (magnitude >= 0x477ff000u) ? (VecU{} + 0x7c00u) : h;  // 65520 and above round to infinity
  h = (magnitude > 0x7f800000u) ? (VecU{} + 0x7e00u) : h;
  return __builtin_convertvector(sign | h, VecH);
}
#endif

// ---- loads and stores: kLanes elements, or the first `count` with the rest zero ----

template <class T>
KERNELS_INLINE VecF load(const T* p) {
  if constexpr (std::is_same_v<T, float>) {
    VecF v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  } else {
    VecH bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    if constexpr (std::is_same_v<T, BFloat16>) return bf16_to_float(bits);
    else return fp16_to_float(bits);
  }
}

template <class T>
KERNELS_INLINE void store(T* p, VecF v) {
  if constexpr (std::is_same_v<T, float>) {
    __builtin_memcpy(p, &v, sizeof(v));
  } else {
    VecH bits;
    if constexpr (std::is_same_v<T, BFloat16>) bits = __builtin_convertvector(float_to_bf16_bits(v), VecH);
    else bits = float_to_fp16(v);
    __builtin_memcpy(p, &bits, sizeof(bits));
  }
}

template <class T>
KERNELS_INLINE VecF load(const T* p, int64_t count) {
  if (count == kLanes) return load(p);
  T padded[kLanes] = {};
  __builtin_memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}

template <class T>
KERNELS_INLINE void store(T* p, VecF v, int64_t count) {
  if (count == kLanes) {
    store(p, v);
    return;
  }
  T padded[kLanes];
  store(padded, v);
  __builtin_memcpy(p, padded, static_cast<size_t>(count) * sizeof(T));
}

// The float value that v has after being stored as T.
template <class T>
KERNELS_INLINE VecF round_to(VecF v) {
  if constexpr (std::is_same_v<T, float>) return v;
  else if constexpr (std::is_same_v<T, BFloat16>) return (VecF)(float_to_bf16_bits(v) << 16);
  else return fp16_to_float(float_to_fp16(v));
}

// Calls body(offset, count) over [0, n): whole vectors with the constant kLanes, then the tail.
template <class Body>
KERNELS_INLINE void for_vectors(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, n - i);
}

// ---- reductions over the lanes, always in the same pairs ----

KERNELS_INLINE float sum_lanes(VecF v) {
  float lane[kLanes];
  __builtin_memcpy(lane, &v, sizeof(v));
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

KERNELS_INLINE float max_lanes(VecF v) {
  float lane[kLanes];
  __builtin_memcpy(lane, &v, sizeof(v));
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  }
  return lane[0];
}

// ---- exp ----

// e^x within 2 units in the last place for -87.3 <= x <= 88.37; 0 below, infinity above (the true values there are
// subnormal, or within a factor 2 of the largest float). NaN stays NaN.
//
// e^x = 2^n * e^r, n = round(x / ln 2), |r| <= ln(2) / 2. Adding and subtracting 1.5 * 2^23 rounds to an integer. ln 2
// is split in two so that n * ln 2 is exact in its high part (Cody and Waite). e^r is its Taylor polynomial to
// r^7 / 7!: the first term left out is under 2^-27 for the largest r.
KERNELS_INLINE VecF exp(VecF x) {
  constexpr float kLowest = -87.3f;
  constexpr float kHighest = 88.37f;
  constexpr float kRoundToInteger = 12582912.0f;
  VecF t = (x < kLowest) ? broadcast(kLowest) : x;
  t = (t > kHighest) ? broadcast(kHighest) : t;
  const VecF n = (t * 1.44269504088896341f + kRoundToInteger) - kRoundToInteger;
  VecF r = t - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  VecF p = broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // A NaN in n makes this power arbitrary, but p is NaN then, and the product with it.
  const VecF power = (VecF)((__builtin_convertvector(n, VecI) + 127) << 23);
  VecF y = p * power;
  y = (x < kLowest) ? VecF{} : y;
  return (x > kHighest) ? broadcast(kInfinity) : y;
}

KERNELS_INLINE float exp(float x) { return exp(broadcast(x))[0]; }

// ---- transpose of a kLanes x kLanes block ----

#if defined(__AVX512F__)
#define KERNELS_LOW_LANES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define KERNELS_HIGH_LANES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define KERNELS_LOW_LANES 0, 8, 1, 9, 2, 10, 3, 11
#define KERNELS_HIGH_LANES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define KERNELS_LOW_LANES 0, 4, 1, 5
#define KERNELS_HIGH_LANES 2, 6, 3, 7
#endif

// Reads kLanes rows of kLanes floats at src (row stride in floats) and writes them as columns at dst.
// Each pass interleaves row i with row i + kLanes/2; log2(kLanes) such perfect shuffles are a transpose.
KERNELS_INLINE void transpose_block(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  VecF a[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) a[i] = load(src + i * src_stride);
#pragma GCC unroll 8
  for (int64_t pass = 1; pass < kLanes; pass *= 2) {
    VecF b[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes / 2; ++i) {
      b[2 * i] = __builtin_shufflevector(a[i], a[i + kLanes / 2], KERNELS_LOW_LANES);
      b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + kLanes / 2], KERNELS_HIGH_LANES);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) a[i] = b[i];
  }
  for (int64_t i = 0; i < kLanes; ++i) store(dst + i * dst_stride, a[i]);
}

#undef KERNELS_LOW_LANES
#undef KERNELS_HIGH_LANES

}  // namespace kernels::KERNELS_ISA
