// overflow_: counts the infs, NaNs and zeros of a skipped step's grads, and finds their first inf or NaN and their
// largest finite magnitude. Grads are read only if a step is skipped, by overflow_ or by the step itself.
#pragma once

#include "common/cpu.h"
#include "common/table.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// One grad's line of the report. fp64 holds counts and indices exactly up to 2^53, so shares may be merged in any
// order.
struct Overflow {
  double size, infs, nans;
  double first;    // index of the first inf or NaN, in the order of memory; inf if there is none
  double largest;  // finite magnitude
  double zeros;
};

MPK_FN Overflow merge(const Overflow& a, const Overflow& b) {
  return {a.size + b.size,
          a.infs + b.infs,
          a.nans + b.nans,
          a.first < b.first ? a.first : b.first,
          a.largest > b.largest ? a.largest : b.largest,
          a.zeros + b.zeros};
}

// Counts along a span, in integers. F is a float or a vector of floats; a vector's lanes count apart.
template <class F, class U = Bits<F>>
struct Tally {
  U infs{}, nans{}, first = ~U{}, largest{}, zeros{};
};

// C is F, or the scalar in F's lanes.
template <class C, class F, class U = Bits<F>>
MPK_FN void count(Tally<F>& tally, F x, U at) {
  const U size = magnitude(x), none{}, one = none + 1, infinity = none + (Bits<C>{kLargestFinite<C>} + 1);
  tally.infs += size == infinity ? one : none;
  tally.nans += size > infinity ? one : none;
  tally.zeros += size == none ? one : none;
  const U place = size < infinity ? ~none : at, finite = size < infinity ? size : none;
  tally.first = place < tally.first ? place : tally.first;
  tally.largest = larger(finite, tally.largest);
}

// The tally began at the grad's element `begin`.
template <class C>
MPK_FN Overflow line_of(const Tally<C>& tally, int64_t begin) {
  return {0,
          static_cast<double>(tally.infs),
          static_cast<double>(tally.nans),
          ~tally.first ? static_cast<double>(begin) + static_cast<double>(tally.first) : INFINITY,
          bit_cast<C>(tally.largest),
          static_cast<double>(tally.zeros)};
}

struct OverflowReport {
  Overflow* lines;     // a heading, then one line per grad; null: write no report
  const float* scale;  // the loss scale of the step; null without a scaler
  bool is_unscaled;    // whether the grads have been divided by the scale

  MPK_FN void head() const { lines[0] = {1, scale ? *scale : 0.0, scale && !is_unscaled ? *scale : 1.0, 0, 0, 0}; }
  MPK_FN void put(int32_t grad, Overflow line, int64_t size) const {
    line.size = static_cast<double>(size);
    lines[1 + grad] = line;
  }
};

MPK_FOR_EACH_ISA(Overflow overflow_span(Dtype dtype, const void* grads, int64_t begin, int64_t size))

#ifdef MPK_CUDA
// `memory` comes from RowMemory. chunk_lines and tickets are scratch: one entry per chunk, and one per grad.
cudaError_t overflow_cuda(const Table& grads, Row* memory, const float* found_inf, const OverflowReport& report,
                          Overflow* chunk_lines, uint32_t* tickets, cudaStream_t stream);
#endif

}  // namespace mpk
