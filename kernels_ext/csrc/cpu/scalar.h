// Scalar element types of the CPU kernels and their exact conversions, with no torch header, so that files
// compiled for one instruction set can include it. Everything is in an unnamed namespace on purpose: each
// such file gets its own copy, and the linker cannot hand AVX-512 code to the generic kernels.
#pragma once

#include <bit>
#include <cstdint>

namespace kernels {

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

namespace {

[[maybe_unused]] inline float to_float(float v) { return v; }

[[maybe_unused]] inline float to_float(BFloat16 v) {
  return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16);
}

// Moves the fp16 exponent and mantissa into fp32's place and multiplies by 2^112, which rebiases the
// exponent and normalises subnormals in one exact step; only Inf and NaN need their exponent set.
[[maybe_unused]] inline float to_float(Float16 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(v.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x007fffffu));
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

// All three round to nearest, ties to even; NaN stays a (quiet) NaN.
template <class T>
T from_float(float v);

template <>
[[maybe_unused]] inline float from_float<float>(float v) {
  return v;
}

template <>
[[maybe_unused]] inline BFloat16 from_float<BFloat16>(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
[[maybe_unused]] inline Float16 from_float<Float16>(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  // 65520 is the midpoint between fp16's largest number and what would follow it.
  if (magnitude >= std::bit_cast<uint32_t>(65520.0f)) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < std::bit_cast<uint32_t>(0x1p-14f)) {
    // Subnormal result: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)))};
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((magnitude - (112u << 23)) >> 13))};
}

}  // namespace
}  // namespace kernels
