#include "common/rows.h"
#include "grads/grad_stats.h"

namespace mpk {

// `bad` is joined as an integer, because some chips are slow in fp64.
static __device__ Stats block_sum(double sumsq, bool bad) {
  const double sum = block_sum(sumsq);
  return {sum, __syncthreads_or(bad) ? 1.0 : 0.0};
}

static __device__ Stats load_past_l1(const Stats* stats) { return {__ldcg(&stats->sumsq), __ldcg(&stats->bad)}; }

template <class T>
struct PackOf {
  T elements[kSumPack];
};
template <class T>
struct Held {
  uint4 words[sizeof(PackOf<T>) / sizeof(uint4)];
};

// Loads a pack. If only `left` of its elements exist, the others are 0.
template <class T>
static __device__ __forceinline__ Held<T> load_pack(const T* data, int64_t left, bool is_aligned) {
  Held<T> held{};
  if (is_aligned && left >= kSumPack) {
    for (size_t i = 0; i < sizeof held / sizeof(uint4); ++i) held.words[i] = reinterpret_cast<const uint4*>(data)[i];
  } else if (left > 0) {
    PackOf<T> pack{};
#pragma unroll
    for (int i = 0; i < kSumPack; ++i) {
      if (i < left) pack.elements[i] = data[i];
    }
    held = bit_cast<Held<T>>(pack);
  }
  return held;
}

template <class T>
static __device__ __forceinline__ double sum_of_pack(const Held<T>& held, bool& bad) {
  const auto pack = bit_cast<PackOf<T>>(held);
  Compute<T> x[kSumPack];
#pragma unroll
  for (int i = 0; i < kSumPack; ++i) {
    x[i] = widen(pack.elements[i]);
    if (sizeof(T) == sizeof(double)) bad |= is_non_finite<T>(x[i]);
  }
  const auto sum = sum_of_squares(x);
  if constexpr (sizeof(T) < sizeof(double)) {
    if (is_beyond_fp32(bit_cast<uint32_t>(sum))) return wide_sum_of_squares(x);
  }
  return sum;
}

// Returns this thread's share of its block's sum. fp64 data with an inf or NaN sets `bad`.
template <class T>
static __device__ __forceinline__ double share_of_sum(const T* data, int64_t size, bool& bad) {
  constexpr int at_once = kPacksInFlight * sizeof(uint4) / sizeof(PackOf<T>);
  data = in_global(data);
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0;
  double sum = 0;
  for (int64_t first = threadIdx.x * kSumPack; first < size; first += at_once * kThreads * kSumPack) {
    Held<T> held[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int64_t at = first + i * kThreads * kSumPack;
      held[i] = load_pack(data + at, size - at, is_aligned);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) sum += sum_of_pack(held[i], bad);
  }
  return sum;
}

// One block per chunk; the last block of a tensor adds up its chunks, and the last block of all adds up the tensors.
template <class Rows>
__global__ void __launch_bounds__(kThreads)
    grad_stats_kernel(const Rows __grid_constant__ grads, GradStats stats, Stats* chunk_stats, uint32_t* tickets) {
  const Span span = span_of_block(grads);
  const Row& row = row_at(grads, span.row);
  const int32_t tensor = span.row, tensors = grads.count;

  bool bad = false;
  const double share = with_dtype(row.dtype, [&](auto zero) {
    using T = decltype(zero);
    const double sumsq = share_of_sum(static_cast<const T*>(row.at(span.begin)), span.size, bad);
    // Finite grads can't make the sum inf or NaN. The sum has no sign, so its bits are compared without fabs in fp64.
    if (sizeof(T) < sizeof(double)) bad = bit_cast<uint64_t>(sumsq) > kLargestFinite<double>;
    return sumsq;
  });
  const Stats sum = block_sum(share, bad);
  if (threadIdx.x == 0) chunk_stats[span.chunk] = sum;
  const int32_t chunks = chunks_of(row.size, grads.chunk_size);
  if (!last_one_out(tickets + tensor, chunks)) return;

  Stats tensor_stats{};
  for (int32_t i = threadIdx.x; i < chunks; i += kThreads) {
    tensor_stats = merge(tensor_stats, load_past_l1(chunk_stats + row.first_chunk + i));
  }
  tensor_stats = block_sum(tensor_stats.sumsq, tensor_stats.bad > 0);
  if (threadIdx.x == 0) {
    stats.sumsq[tensor] = tensor_stats.sumsq;
    stats.nonfinite[tensor] = tensor_stats.bad > 0 ? 1.0f : 0.0f;
  }
  if (!last_one_out(tickets + tensors, tensors)) return;

  Stats total{};
  for (int32_t i = threadIdx.x; i < tensors; i += kThreads) {
    total = merge(total, {__ldcg(stats.sumsq + i), __ldcg(stats.nonfinite + i)});
  }
  total = block_sum(total.sumsq, total.bad > 0);
  if (threadIdx.x == 0) {
    *stats.total_sumsq = total.sumsq;
    *stats.found_inf = total.bad > 0 ? 1.0f : 0.0f;
  }
}

cudaError_t grad_stats_cuda(const Table& grads, Row* memory, const GradStats& stats, Stats* chunk_stats,
                            uint32_t* tickets, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(tickets, 0, sizeof(uint32_t) * (grads.count + 1), stream);
  if (error != cudaSuccess) return error;
  return with_rows(grads, memory, stream, [&](const auto& rows) {
    return launch(grad_stats_kernel<std::decay_t<decltype(rows)>>, grads.chunks, stream, rows, stats, chunk_stats,
                  tickets);
  });
}

cudaError_t grad_stats_cuda(const Stretch& stretch, void* const* grads, const GradStats& stats, Stats* chunk_stats,
                            uint32_t* tickets, cudaStream_t stream) {
  const auto launch_with = [&](const auto& rows) {
    return launch(grad_stats_kernel<std::decay_t<decltype(rows)>>, rows.chunks(), stream, rows, stats, chunk_stats,
                  tickets);
  };
  return stretch.rows() <= kSmallStretch ? launch_with(StretchAt<kSmallStretch>(stretch, grads))
                                         : launch_with(StretchAt<Stretch::kMostRows>(stretch, grads));
}

}  // namespace mpk
