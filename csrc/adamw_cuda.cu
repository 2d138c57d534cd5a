#include "adamw.h"
#include "common/cuda.h"

namespace mpk {

static constexpr int kElements = 8;  // a thread's share of a round: 16 bytes in 16-bit formats, 32 in fp32

template <class C, int count>
struct Elements {
  C at[count];
};

// Adjacent elements of an array in the computing type, and back. Neighbours are read and written 16 bytes at a time.
template <class C, int count>
__device__ Elements<C, count> load_as(Dtype dtype, const void* array, int64_t first) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Elements<C, count> wide{};
    if constexpr (std::is_same_v<C, Compute<T>>) {
      const auto* const from = static_cast<const T*>(array) + first;
      Elements<T, count> narrow;
      if constexpr (count == 1) {
        narrow.at[0] = *from;
      } else {
        constexpr int words = count * sizeof(T) / sizeof(uint4);
        Elements<uint4, words> raw;
        for (int i = 0; i < words; ++i) raw.at[i] = reinterpret_cast<const uint4*>(from)[i];
        narrow = bit_cast<Elements<T, count>>(raw);
      }
      for (int i = 0; i < count; ++i) wide.at[i] = widen(narrow.at[i]);
    }
    return wide;
  });
}

template <class T, int count>
__device__ void store(T* to, const Elements<T, count>& from) {
  if constexpr (count == 1) {
    *to = from.at[0];
  } else {
    constexpr int words = count * sizeof(T) / sizeof(uint4);
    const auto raw = bit_cast<Elements<uint4, words>>(from);
    for (int i = 0; i < words; ++i) reinterpret_cast<uint4*>(to)[i] = raw.at[i];
  }
}

template <class C, int count>
__device__ void store_as(Dtype dtype, void* array, int64_t first, const Elements<C, count>& wide) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<C, Compute<T>>) {
      Elements<T, count> rounded;
      for (int i = 0; i < count; ++i) narrow(wide.at[i], rounded.at[i]);
      store(static_cast<T*>(array) + first, rounded);
    }
  });
}

template <int count>
__device__ Elements<uint16_t, count> load_bits(const void* array, int64_t first) {
  const auto* const from = static_cast<const uint16_t*>(array) + first;
  if constexpr (count == 1) {
    return {*from};
  } else {
    return bit_cast<Elements<uint16_t, count>>(*reinterpret_cast<const uint4*>(from));
  }
}

template <class C, int count>
__device__ Elements<C, count> load_weight(const AdamwRow& row, int64_t first) {
  if constexpr (std::is_same_v<C, float>) {
    if (row.master_kind == Master::fp32) return load_as<C, count>(Dtype::f32, row.master, first);
    if (row.master_kind == Master::split) {
      const auto weight = load_bits<count>(row.param, first), remainder = load_bits<count>(row.master, first);
      Elements<C, count> master;
      for (int i = 0; i < count; ++i) {
        const Split<uint32_t> split{weight.at[i], remainder.at[i]};
        master.at[i] = bit_cast<float>(row.param_dtype == Dtype::b16 ? join_bf16(split) : join_fp16<float>(split));
      }
      return master;
    }
  }
  return load_as<C, count>(row.param_dtype, row.param, first);
}

template <class C, int count>
__device__ void store_weight(const AdamwRow& row, int64_t first, const Elements<C, count>& master) {
  if constexpr (std::is_same_v<C, float>) {
    if (row.master_kind == Master::split) {
      Elements<uint16_t, count> weight, remainder;
      for (int i = 0; i < count; ++i) {
        const auto bits = bit_cast<uint32_t>(master.at[i]);
        const auto split = row.param_dtype == Dtype::b16 ? split_bf16(bits) : split_fp16<float>(bits);
        weight.at[i] = static_cast<uint16_t>(split.weight);
        remainder.at[i] = static_cast<uint16_t>(split.remainder);
      }
      store(static_cast<uint16_t*>(row.param) + first, weight);
      store(static_cast<uint16_t*>(row.master) + first, remainder);
      return;
    }
    if (row.master_kind == Master::fp32) store_as(Dtype::f32, row.master, first, master);
  }
  store_as(row.param_dtype, row.param, first, master);
}

template <class C, int count>
__device__ void step(const AdamwRow& row, int64_t first, const AdamwScalars<C>& by) {
  auto weight = load_weight<C, count>(row, first);
  const auto grad = load_as<C, count>(row.grad_dtype, row.grad, first);
  auto exp_avg = load_as<C, count>(row.state_dtype, row.exp_avg, first);
  auto exp_avg_sq = load_as<C, count>(row.state_dtype, row.exp_avg_sq, first);
  const bool amsgrad = row.max_exp_avg_sq != nullptr;
  Elements<C, count> largest{};
  if (amsgrad) largest = load_as<C, count>(row.state_dtype, row.max_exp_avg_sq, first);
  for (int i = 0; i < count; ++i) {
    const AdamwElement<C> before{weight.at[i], exp_avg.at[i], exp_avg_sq.at[i], largest.at[i]};
    const AdamwElement<C> after = adamw(before, grad.at[i], amsgrad, by);
    weight.at[i] = after.param;
    exp_avg.at[i] = after.exp_avg;
    exp_avg_sq.at[i] = after.exp_avg_sq;
    largest.at[i] = after.max_exp_avg_sq;
  }
  store_weight(row, first, weight);
  store_as(row.state_dtype, row.exp_avg, first, exp_avg);
  store_as(row.state_dtype, row.exp_avg_sq, first, exp_avg_sq);
  if (amsgrad) store_as(row.state_dtype, row.max_exp_avg_sq, first, largest);
}

static __device__ bool are_aligned(const AdamwRow& row) {
  const auto bits = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  return (bits(row.param) | bits(row.grad) | bits(row.exp_avg) | bits(row.exp_avg_sq) | bits(row.max_exp_avg_sq) |
          bits(row.master)) %
             sizeof(uint4) ==
         0;
}

template <class C>
__device__ void step_span(const AdamwRow& row, const Span& span, const AdamwScalars<C>& by) {
  const int64_t rounds = are_aligned(row) ? span.size / kElements : 0;
  for (int64_t i = threadIdx.x; i < rounds; i += kThreads) step<C, kElements>(row, span.begin + i * kElements, by);
  for (int64_t i = rounds * kElements + threadIdx.x; i < span.size; i += kThreads) step<C, 1>(row, span.begin + i, by);
}

// Groups travel with the page: their numbers may change from step to step.
template <int capacity>
struct Groups {
  AdamwGroup at[capacity];
};

// One block a chunk; the last block of a parameter counts the step, which all of them have read by then.
template <class RowPage, class GroupPage>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ RowPage page, const __grid_constant__ GroupPage groups,
                 const __grid_constant__ AdamwShared shared, int32_t first_group, uint32_t* tickets) {
  if (shared.found_inf && *shared.found_inf != 0) return;
  const Span span = page.span_of_block();
  const AdamwRow& row = page.rows[span.row];
  const AdamwGroup& group = groups.at[row.group - first_group];
  const float steps_before = *row.step;
  if (row.param_dtype == Dtype::f64) {
    step_span(row, span, adamw_scalars<double>(group, shared, steps_before));
  } else {
    step_span(row, span, adamw_scalars<float>(group, shared, steps_before));
  }
  const int32_t chunks = chunks_of(row.size, page.chunk_size);
  if (last_one_out(tickets + page.first_row + span.row, chunks) && threadIdx.x == 0) *row.step = steps_before + 1;
}

template <int rows, int groups>
static cudaError_t launch_pages(const TableOf<AdamwRow>& table, const AdamwGroup* all, int32_t group_count,
                                const AdamwShared& shared, uint32_t* tickets, cudaStream_t stream) {
  return for_each_page_of<rows>(table, [&](const auto& page, int64_t blocks) {
    Groups<groups> window{};
    const int32_t first = page.rows[0].group;
    const int32_t count = group_count - first < groups ? group_count - first : groups;
    memcpy(window.at, all + first, sizeof(AdamwGroup) * count);
    return launch(adamw_kernel<std::decay_t<decltype(page)>, Groups<groups>>, blocks, stream, page, window, shared,
                  first, tickets);
  });
}

cudaError_t adamw_cuda(const TableOf<AdamwRow>& table, const AdamwGroup* groups, int32_t group_count,
                       const AdamwShared& shared, uint32_t* tickets, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(tickets, 0, sizeof(uint32_t) * table.count, stream);
  if (error != cudaSuccess) return error;
  // A page never holds rows of more groups than it has room for: each group has at least one row.
  return table.count <= 28 ? launch_pages<28, 28>(table, groups, group_count, shared, tickets, stream)
                           : launch_pages<236, 236>(table, groups, group_count, shared, tickets, stream);
}

}  // namespace mpk
