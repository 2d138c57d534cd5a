// A CUDA block's part of the report on a skipped step's grads. Every kernel that can skip a step calls it.
#pragma once

#include "common/rows.h"
#include "grads/overflow.h"

namespace mpk {

static __device__ Overflow block_merge(const Overflow& share) {
  const auto least = [](double a, double b) { return a < b ? a : b; };
  const auto largest = [](double a, double b) { return a > b ? a : b; };
  return {0,
          block_sum(share.infs),
          block_sum(share.nans),
          block_join(share.first, least),
          block_join(share.largest, largest),
          block_sum(share.zeros)};
}

static __device__ Overflow load_past_l1(const Overflow* line) {
  return {
      0, __ldcg(&line->infs), __ldcg(&line->nans), __ldcg(&line->first), __ldcg(&line->largest), __ldcg(&line->zeros)};
}

// Each block counts one chunk; the last block of a grad merges its chunks. All blocks of a table call this, or none.
template <class Rows>
__device__ void overflow_block(const Rows& table, const Row& grad, const Span& span, const OverflowReport& report,
                               Overflow* chunk_lines, uint32_t* tickets) {
  if (blockIdx.x == 0 && threadIdx.x == 0) report.head();
  Overflow share = with_dtype(grad.dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    const T* const data = in_global(static_cast<const T*>(grad.at(span.begin)));
    constexpr int at_once = 4;  // loads in flight
    Tally<C> tally;
    for (int64_t first = threadIdx.x; first < span.size; first += kThreads * at_once) {
      T held[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (first + k * kThreads < span.size) held[k] = data[first + k * kThreads];
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int64_t i = first + k * kThreads;
        if (i < span.size) count<C>(tally, widen(held[k]), static_cast<Bits<C>>(i));
      }
    }
    return line_of(tally, span.begin);
  });
  share = block_merge(share);
  if (threadIdx.x == 0) chunk_lines[span.chunk] = share;
  const int32_t chunks = chunks_of(grad.size, table.chunk_size);
  if (!last_one_out(tickets + span.row, chunks)) return;

  Overflow whole = line_of(Tally<float>{}, 0);
  for (int32_t i = threadIdx.x; i < chunks; i += kThreads) {
    whole = merge(whole, load_past_l1(chunk_lines + grad.first_chunk + i));
  }
  whole = block_merge(whole);
  if (threadIdx.x == 0) report.put(span.row, whole, grad.size);
}

}  // namespace mpk
