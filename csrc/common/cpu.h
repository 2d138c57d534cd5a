// Which instruction set a CPU kernel runs with. simd.h says how the variants come about.
#pragma once

#include <cstdlib>
#include <string>

#ifdef MPK_X86
#include <cpuid.h>
#endif

namespace mpk {

// Whether oneDNN, which multiplies for torch, multiplies matrices of 16-bit numbers faster than fp32 ones: with AMX or
// AVX-512.
struct HalfProducts {
  bool fp16, bf16;
};

// Returns which formats ONEDNN_MAX_CPU_ISA, oneDNN's own variable, leaves allowed.
inline HalfProducts allowed_half_products() {
  const char* const limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  const std::string isa = limit ? limit : "ALL";
  const auto has = [&](const char* part) { return isa.find(part) != std::string::npos; };
  const bool any = isa == "ALL" || isa == "DEFAULT" || has("AVX10"), fp16 = any || has("FP16") || has("AMX");
  return {fp16, fp16 || has("BF16")};
}

enum class Isa { baseline, avx2, avx512 };

#ifdef MPK_X86
inline Isa best_isa() {
  static const Isa isa = __builtin_cpu_supports("x86-64-v4")   ? Isa::avx512
                         : __builtin_cpu_supports("x86-64-v3") ? Isa::avx2
                                                               : Isa::baseline;
  return isa;
}
#define MPK_FOR_EACH_ISA(declaration) \
  namespace baseline {                \
  declaration;                        \
  }                                   \
  namespace avx2 {                    \
  declaration;                        \
  }                                   \
  namespace avx512 {                  \
  declaration;                        \
  }
#define MPK_BEST(function) \
  (best_isa() == Isa::avx512 ? &avx512::function : best_isa() == Isa::avx2 ? &avx2::function : &baseline::function)
inline HalfProducts half_products() {
  unsigned a = 0, b = 0, c = 0, d = 0, a1 = 0, unused = 0;
  if (!__builtin_cpu_supports("x86-64-v4") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {false, false};
  if (a >= 1) __get_cpuid_count(7, 1, &a1, &unused, &unused, &unused);
  const bool avx512_fp16 = d >> 23 & 1, amx_bf16 = d >> 22 & 1, avx512_bf16 = a1 >> 5 & 1, amx_fp16 = a1 >> 21 & 1;
  const HalfProducts allowed = allowed_half_products();
  return {allowed.fp16 && (avx512_fp16 || amx_fp16), allowed.bf16 && (avx512_bf16 || amx_bf16)};
}
#else
inline HalfProducts half_products() { return {false, false}; }
inline Isa best_isa() { return Isa::baseline; }
#define MPK_FOR_EACH_ISA(declaration) \
  namespace baseline {                \
  declaration;                        \
  }
#define MPK_BEST(function) (&baseline::function)
#endif

}  // namespace mpk
