#include "isa.h"

#include <torch/csrc/stable/library.h>

#include "../checks.h"

namespace kernels {
namespace {

// __builtin_cpu_supports asks cpuid, and xgetbv for whether the operating system saves the wide registers.
Isa detect_isa() {
#if KERNELS_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi2");
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

int64_t cpu_isa() { return static_cast<int64_t>(best_isa()); }

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAuto: return "auto";
    case Isa::kGeneric: return "generic";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "unknown";
}

Isa best_isa() {
  static const Isa best = detect_isa();
  return best;
}

bool has_avx512_bf16() {
#if KERNELS_X86
  static const bool has = best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

Isa resolve_isa(const char* op, int64_t requested) {
  if (requested == static_cast<int64_t>(Isa::kAuto)) return best_isa();
  KERNELS_CHECK(requested >= 1 && requested <= 3, op, ": isa must be 0 (auto), 1 (generic), 2 (avx2) or 3 (avx512), got ",
                  requested);
  const Isa isa = static_cast<Isa>(requested);
  KERNELS_CHECK(isa <= best_isa(), op, ": isa ", isa_name(isa), " was asked for, but this processor has ",
                  isa_name(best_isa()));
  return isa;
}

}  // namespace kernels

// No tensor argument, so no backend to dispatch on: one kernel for all.
STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&kernels::cpu_isa));
}
