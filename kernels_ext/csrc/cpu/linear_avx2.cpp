// The linear kernels in AVX2, FMA and F16C. linear_core.h says what is defined here.
//
// A byte of bitmap expands 8 values. The byte is the index into a table of shuffle controls, which move the
// packed values to the places of the set bits and put zeros between. For bf16 the control also moves each
// value to the high half of a 32-bit lane, which makes it an fp32: one shuffle decodes 8 elements.
// The tables take 8 KB (4 KB for fp16) of the L1 cache.

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>

#include "scalar.h"

namespace kernels {
namespace {

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int64_t kOverread = 8;  // expand loads 8 elements wherever the row's values stop

// 16 vector registers hold R * tokens sums, R decoded vectors and x; four rows spill the general ones.
constexpr int rows_for_tile(int tokens) { return tokens <= 4 ? 2 : 1; }

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

inline float sum(Vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_movehdup_ps(s));
  return _mm_cvtss_f32(s);
}

// --- tables ---------------------------------------------------------------------------------------------

constexpr uint8_t kZeroByte = 0x80;           // pshufb: this byte of the result is zero
constexpr uint32_t kAbsent = 0x80000000u;     // vpermd ignores the high bit; mask_absent reads it

template <class Lane, int kSize>
using Table = std::array<std::array<Lane, kSize>, 256>;

// For each byte of bitmap, where the 16-bit value of column i goes: bytes [i * stride + offset, + 2).
template <int kStride, int kOffset>
constexpr Table<uint8_t, 8 * kStride> expand_bytes() {
  Table<uint8_t, 8 * kStride> table{};
  for (unsigned bits = 0; bits < 256; ++bits) {
    for (uint8_t& control : table[bits]) control = kZeroByte;
    uint8_t rank = 0;
    for (unsigned i = 0; i < 8; ++i) {
      if (!(bits >> i & 1)) continue;
      table[bits][i * kStride + kOffset] = static_cast<uint8_t>(2 * rank);
      table[bits][i * kStride + kOffset + 1] = static_cast<uint8_t>(2 * rank + 1);
      ++rank;
    }
  }
  return table;
}

constexpr Table<uint32_t, 8> expand_lanes() {
  Table<uint32_t, 8> table{};
  for (unsigned bits = 0; bits < 256; ++bits) {
    uint32_t rank = 0;
    for (unsigned i = 0; i < 8; ++i) table[bits][i] = bits >> i & 1 ? rank++ : kAbsent;
  }
  return table;
}

// The inverse: which column each packed value comes from.
constexpr Table<uint8_t, 16> compress_bytes() {
  Table<uint8_t, 16> table{};
  for (unsigned bits = 0; bits < 256; ++bits) {
    unsigned rank = 0;
    for (unsigned i = 0; i < 8; ++i) {
      if (!(bits >> i & 1)) continue;
      table[bits][2 * rank] = static_cast<uint8_t>(2 * i);
      table[bits][2 * rank + 1] = static_cast<uint8_t>(2 * i + 1);
      ++rank;
    }
  }
  return table;
}

constexpr Table<uint32_t, 8> compress_lanes() {
  Table<uint32_t, 8> table{};
  for (unsigned bits = 0; bits < 256; ++bits) {
    unsigned rank = 0;
    for (unsigned i = 0; i < 8; ++i) {
      if (bits >> i & 1) table[bits][rank++] = i;
    }
  }
  return table;
}

alignas(64) constexpr auto kExpandToHighHalf = expand_bytes<4, 2>();
alignas(64) constexpr auto kExpandBytes = expand_bytes<2, 0>();
alignas(64) constexpr auto kExpandLanes = expand_lanes();
alignas(64) constexpr auto kCompressBytes = compress_bytes();
alignas(64) constexpr auto kCompressLanes = compress_lanes();

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// A byte of the block, times the size of an entry: the byte offset into a table. The rotation moves and scales the
// byte in one instruction, and its population count is still the number of values.
template <int kEntryBytes>
inline uint64_t table_offset(uint64_t block, int c) {
  return std::rotr(block, c - std::countr_zero(unsigned{kEntryBytes})) & (uint64_t{0xff} * kEntryBytes);
}

template <class Entries>
inline const char* entry(const Entries& table, uint64_t offset) {
  return reinterpret_cast<const char*>(table.data()) + offset;
}

inline __m128i expand16(const void* values, uint64_t offset) {
  return _mm_shuffle_epi8(load128(values), load128(entry(kExpandBytes, offset)));
}

inline __m256i expand32(const void* values, uint64_t offset) {
  const __m256i lanes = load256(entry(kExpandLanes, offset));
  const __m256i absent = _mm256_srai_epi32(lanes, 31);
  return _mm256_andnot_si256(absent, _mm256_permutevar8x32_epi32(load256(values), lanes));
}

// --- elements -------------------------------------------------------------------------------------------

template <class T>
struct Element;

template <>
struct Element<BFloat16> {
  static constexpr int kColumns = 8;
  static constexpr int kVecs = 1;

  static uint64_t select(uint64_t block, int c) { return table_offset<32>(block, c); }

  static void dense(const BFloat16* p, Vec* v) {
    *v = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
  }

  static void expand(const BFloat16* values, uint64_t bits, Vec* v) {
    const __m256i both_halves = _mm256_broadcastsi128_si256(load128(values));
    *v = _mm256_castsi256_ps(_mm256_shuffle_epi8(both_halves, load256(entry(kExpandToHighHalf, bits))));
  }
};

template <>
struct Element<Float16> {
  static constexpr int kColumns = 8;
  static constexpr int kVecs = 1;

  static uint64_t select(uint64_t block, int c) { return table_offset<16>(block, c); }
  static void dense(const Float16* p, Vec* v) { *v = _mm256_cvtph_ps(load128(p)); }
  static void expand(const Float16* values, uint64_t bits, Vec* v) { *v = _mm256_cvtph_ps(expand16(values, bits)); }
};

template <>
struct Element<float> {
  static constexpr int kColumns = 8;
  static constexpr int kVecs = 1;

  static uint64_t select(uint64_t block, int c) { return table_offset<32>(block, c); }
  static void dense(const float* p, Vec* v) { *v = load(p); }
  static void expand(const float* values, uint64_t bits, Vec* v) { *v = _mm256_castsi256_ps(expand32(values, bits)); }
};

template <class Word>
struct Raw;

template <>
struct Raw<uint16_t> {
  static constexpr int kColumns = 8;

  static uint64_t select(uint64_t block, int c) { return table_offset<16>(block, c); }

  static void expand(const uint16_t* values, uint64_t bits, uint16_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), expand16(values, bits));
  }

  static uint64_t nonzeros(const uint16_t* in) {
    const __m128i zeros = _mm_cmpeq_epi16(load128(in), _mm_setzero_si128());
    return static_cast<uint64_t>(_mm_movemask_epi8(_mm_packs_epi16(zeros, zeros)) & 0xff) ^ 0xff;
  }

  static void compress(const uint16_t* in, uint64_t bits, uint16_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_shuffle_epi8(load128(in), load128(kCompressBytes[bits].data())));
  }
};

template <>
struct Raw<uint32_t> {
  static constexpr int kColumns = 8;

  static uint64_t select(uint64_t block, int c) { return table_offset<32>(block, c); }

  static void expand(const uint32_t* values, uint64_t bits, uint32_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), expand32(values, bits));
  }

  static uint64_t nonzeros(const uint32_t* in) {
    const __m256i zeros = _mm256_cmpeq_epi32(load256(in), _mm256_setzero_si256());
    return static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zeros))) ^ 0xff;
  }

  static void compress(const uint32_t* in, uint64_t bits, uint32_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_permutevar8x32_epi32(load256(in), load256(kCompressLanes[bits].data())));
  }
};

}  // namespace
}  // namespace kernels

#include "linear_core.h"

namespace kernels {

const LinearKernels& avx2_linear_kernels() { return kLinearKernels; }

}  // namespace kernels
