// Which instruction set a CPU kernel runs with. simd.h says how the variants come about.
#pragma once

namespace mpk {

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
#else
inline Isa best_isa() { return Isa::baseline; }
#define MPK_FOR_EACH_ISA(declaration) \
  namespace baseline {                \
  declaration;                        \
  }
#define MPK_BEST(function) (&baseline::function)
#endif

}  // namespace mpk
