// Which x86 instruction sets the CPU kernels may use.
#pragma once

#include <cstdint>

namespace kernels {

// Ordered: a processor that has one has all those before it. kernels_ext/ops.py holds the same numbers.
enum class Isa : int64_t {
  kAuto = 0,     // the best that the processor and the operating system support
  kGeneric = 1,  // plain C++
  kAvx2 = 2,     // AVX2, FMA, F16C, BMI2
  kAvx512 = 3,   // AVX-512 F, BW, VL, DQ, VBMI2
};

const char* isa_name(Isa isa);

// The best instruction set of this processor, asked once.
Isa best_isa();

// Whether this processor can also run code from *_avx512bf16.cpp.
bool has_avx512_bf16();

// Turns an op's `isa` argument into an instruction set. Throws if the number is unknown or the processor
// does not have it; never falls back.
Isa resolve_isa(const char* op, int64_t requested);

}  // namespace kernels
