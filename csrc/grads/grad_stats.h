// grad_stats: sum of squares and a non-finite flag of each grad, and of all grads together; the grads are only read.
#pragma once

#include "common/cpu.h"
#include "common/table.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// A pack is 8 consecutive elements, counted from the grad's first one. Its squares are added in fp32, in pairs; packs
// are added in fp64, which some chips compute at a 64th of the speed. fp64 grads are added in fp64 throughout. Chunks
// are added in a fixed order, whichever thread took which, so that a result repeats to the last bit.
struct Stats {
  double sumsq;
  double bad;  // 0: all finite
};

MPK_FN Stats merge(const Stats& a, const Stats& b) { return {a.sumsq + b.sumsq, a.bad + b.bad}; }

inline constexpr int kSumPack = 8;

template <class C>
MPK_FN C sum_of_squares(const C (&x)[kSumPack]) {
  C squares[kSumPack];
  for (int i = 0; i < kSumPack; ++i) squares[i] = x[i] * x[i];
  return ((squares[0] + squares[1]) + (squares[2] + squares[3])) +
         ((squares[4] + squares[5]) + (squares[6] + squares[7]));
}

// Takes the bits of a pack's sum in fp32, and returns whether the sum lies outside of 2^-100 to 2^100: then squares may
// have underflowed or overflowed.
template <class U>
MPK_FN auto is_beyond_fp32(const U& sum) {
  constexpr uint32_t least = (127 - 100) << 23, most = (127 + 100) << 23;
  return sum - least > most - least;
}

// Adds up a pack in fp64, where squares of fp32 are exact and can't overflow. Most packs that come here are zeros.
MPK_FN double wide_sum_of_squares(const float (&x)[kSumPack]) {
  uint32_t bits = 0;
  for (const float each : x) bits |= magnitude(each);
  if (bits == 0) return 0;
  double wide[kSumPack];
  for (int i = 0; i < kSumPack; ++i) wide[i] = x[i];
  return sum_of_squares(wide);
}

struct GradStats {
  double* sumsq;     // one for each tensor
  float* nonfinite;  // one for each tensor, 0 or 1
  double* total_sumsq;
  float* found_inf;
};

MPK_FOR_EACH_ISA(Stats grad_stats_span(Dtype dtype, const void* grads, int64_t size))

#ifdef MPK_CUDA
// `memory` comes from RowMemory. chunk_stats and tickets are scratch: chunk_stats has one entry per chunk, tickets one
// per tensor and one more.
cudaError_t grad_stats_cuda(const Table& grads, Row* memory, const GradStats& stats, Stats* chunk_stats,
                            uint32_t* tickets, cudaStream_t stream);
// The same for a plan, whose rows stay on the device; the host passes the grads' addresses. The tickets are 0 before
// and after the call.
cudaError_t grad_stats_cuda(const Stretch& stretch, void* const* grads, const GradStats& stats, Stats* chunk_stats,
                            uint32_t* tickets, cudaStream_t stream);
#endif

}  // namespace mpk
