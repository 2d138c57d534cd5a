// grad_stats: sum of squares and a non-finite flag of every grad and of all of them; the grads are only read.
#pragma once

#include "common/cpu.h"
#include "common/table.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// Sums are fp64, where the square of an fp32 is exact and cannot overflow (that of an fp64 can: hence the flag).
// Chunks are summed in a fixed order, whichever thread took which, so that a result repeats to the last bit.
struct Stats {
  double sumsq;
  double bad;  // 0: all finite
};

MPK_FN Stats merge(const Stats& a, const Stats& b) { return {a.sumsq + b.sumsq, a.bad + b.bad}; }

template <class D>
MPK_FN D square(D x) {
  return x * x;
}

struct GradStats {
  double* sumsq;     // one for each tensor
  float* nonfinite;  // one for each tensor, 0 or 1
  double* total_sumsq;
  float* found_inf;
};

MPK_FOR_EACH_ISA(Stats grad_stats_span(Dtype dtype, const void* grads, int64_t size))

#ifdef MPK_CUDA
// memory: for the rows, where they need it (RowMemory); of_chunk: scratch, one for each chunk; tickets: scratch, one
// for each tensor and one more.
cudaError_t grad_stats_cuda(const Table& grads, Row* memory, const GradStats& stats, Stats* of_chunk, uint32_t* tickets,
                            cudaStream_t stream);
// Of grads whose rows stay on the device: where they lie, on the host; tickets that are 0, and are so again afterwards.
cudaError_t grad_stats_cuda(const Stretch& stretch, void* const* grads, const GradStats& stats, Stats* of_chunk,
                            uint32_t* tickets, cudaStream_t stream);
#endif

}  // namespace mpk
