#include "adamw/adamw.h"
#include "common/elements.h"
#include "grads/overflow_block.h"

namespace mpk {

static constexpr int kElements = 8;  // a thread's share of a round: 16 bytes in 16-bit formats, 32 in fp32 and fp64

template <class C, int count>
__device__ Elements<C, count> load_weight(const AdamwRow& row, int64_t first) {
  if constexpr (std::is_same_v<C, float>) {
    if (row.master_kind == Master::fp32) {
      auto master = load_as<C, count>(Dtype::f32, row.master, first);
      const auto written = load_as<C, count>(row.param_dtype, row.param, first);
      for (int i = 0; i < count; ++i) master.at[i] = copied_master(row.param_dtype, master.at[i], written.at[i]);
      return master;
    }
    if (row.master_kind == Master::split) {
      const auto weight = load<count>(static_cast<const uint16_t*>(row.param) + first);
      const auto remainder = load<count>(static_cast<const uint16_t*>(row.master) + first);
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
struct Moments {
  Elements<C, count> exp_avg, exp_avg_sq, largest;
};

// Takes the weights from `first` on, and their moments, one step on.
template <class C, int count>
__device__ void step(const AdamwRow& row, int64_t first, const AdamwScalars<C>& by, Moments<C, count>& moments) {
  auto weight = load_weight<C, count>(row, first);
  const auto grad = load_as<C, count>(row.grad_dtype, row.grad, first);
  for (int i = 0; i < count; ++i) {
    const AdamwElement<C> before{weight.at[i], moments.exp_avg.at[i], moments.exp_avg_sq.at[i], moments.largest.at[i]};
    const AdamwElement<C> after = adamw(before, grad.at[i], row.max_exp_avg_sq != nullptr, by);
    weight.at[i] = after.param;
    moments.exp_avg.at[i] = after.exp_avg;
    moments.exp_avg_sq.at[i] = after.exp_avg_sq;
    moments.largest.at[i] = after.max_exp_avg_sq;
  }
  store_weight(row, first, weight);
}

template <class C, int count>
__device__ void step_plain(const AdamwRow& row, int64_t first, const AdamwScalars<C>& by) {
  Moments<C, count> moments{load_as<C, count>(row.state_dtype, row.exp_avg, first),
                            load_as<C, count>(row.state_dtype, row.exp_avg_sq, first),
                            {}};
  if (row.max_exp_avg_sq) moments.largest = load_as<C, count>(row.state_dtype, row.max_exp_avg_sq, first);
  step(row, first, by, moments);
  store_as(row.state_dtype, row.exp_avg, first, moments.exp_avg);
  store_as(row.state_dtype, row.exp_avg_sq, first, moments.exp_avg_sq);
  if (row.max_exp_avg_sq) store_as(row.state_dtype, row.max_exp_avg_sq, first, moments.largest);
}

static __device__ float largest_of_warp(float value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value = maximum(value, __shfl_xor_sync(0xffffffff, value, lanes));
  return value;
}

// The codes of a thread's moments, `count` from each `first`.
template <int count, class Decode>
__device__ Elements<float, count> decoded(const void* codes, int64_t first, const Decode& decode) {
  const auto raw = load<count>(static_cast<const int8_t*>(codes) + first);
  Elements<float, count> values;
  for (int i = 0; i < count; ++i) values.at[i] = decode(static_cast<float>(raw.at[i]));
  return values;
}

template <int count, class Encode>
__device__ void store_codes(void* codes, int64_t first, const Elements<float, count>& values, const Encode& encode) {
  Elements<int8_t, count> raw;
  for (int i = 0; i < count; ++i) raw.at[i] = static_cast<int8_t>(static_cast<uint8_t>(encode(values.at[i])));
  store(static_cast<int8_t*>(codes) + first, raw);
}

// A warp takes kQuantized elements, whose moments share their scales, each of its threads `count` adjacent ones a
// round.
template <int count>
__device__ void step_int8(const AdamwRow& row, int64_t begin, const AdamwScalars<float>& by) {
  constexpr int rounds = kElements / count;
  const int64_t blocks = (row.size + kQuantized - 1) / kQuantized;
  float* const scales[3] = {row.scales + begin / kQuantized, row.scales + begin / kQuantized + blocks,
                            row.scales + begin / kQuantized + 2 * blocks};
  const auto decode_sq = [&](int which) {
    return [scale = *scales[which]](float q) { return decode_exp_avg_sq(q + 128.0f, scale); };
  };
  Moments<float, count> share[rounds]{};
  float largest[3]{};
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int64_t first = begin + (round * 32 + threadIdx.x % 32) * count;
    if (first >= row.size) continue;
    Moments<float, count>& moments = share[round];
    moments.exp_avg = decoded<count>(row.exp_avg, first, [&](float q) { return decode_exp_avg(q, *scales[0]); });
    moments.exp_avg_sq = decoded<count>(row.exp_avg_sq, first, decode_sq(1));
    if (row.max_exp_avg_sq) moments.largest = decoded<count>(row.max_exp_avg_sq, first, decode_sq(2));
    step(row, first, by, moments);
    for (int i = 0; i < count; ++i) {
      moments.exp_avg_sq.at[i] = SquareRoot<float>::of(moments.exp_avg_sq.at[i]);
      moments.largest.at[i] = SquareRoot<float>::of(moments.largest.at[i]);
      largest[0] = maximum(largest[0], absolute(moments.exp_avg.at[i]));
      largest[1] = maximum(largest[1], moments.exp_avg_sq.at[i]);
      largest[2] = maximum(largest[2], moments.largest.at[i]);
    }
  }
  const int kinds = row.max_exp_avg_sq ? 3 : 2;
  float inverse[3]{};
  for (int which = 0; which < kinds; ++which) {
    const float scale = scale_of(largest_of_warp(largest[which]));  // by now all lanes have read the old one
    inverse[which] = inverse_of(scale);
    if (threadIdx.x % 32 == 0) *scales[which] = scale;
  }
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int64_t first = begin + (round * 32 + threadIdx.x % 32) * count;
    if (first >= row.size) continue;
    const auto encode_sq = [&](int which) {
      return [by = inverse[which]](float root) { return encode_exp_avg_sq(root, by); };
    };
    store_codes(row.exp_avg, first, share[round].exp_avg, [&](float x) { return encode_exp_avg(x, inverse[0]); });
    store_codes(row.exp_avg_sq, first, share[round].exp_avg_sq, encode_sq(1));
    if (row.max_exp_avg_sq) store_codes(row.max_exp_avg_sq, first, share[round].largest, encode_sq(2));
  }
}

static __device__ bool are_aligned(const AdamwRow& row) {
  const auto bits = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  return (bits(row.param) | bits(row.grad) | bits(row.exp_avg) | bits(row.exp_avg_sq) | bits(row.max_exp_avg_sq) |
          bits(row.master)) %
             sizeof(uint4) ==
         0;
}

static __device__ void step_span_int8(const AdamwRow& row, const Span& span, const AdamwScalars<float>& by) {
  const bool aligned = are_aligned(row);
  for (int64_t i = threadIdx.x / 32 * kQuantized; i < span.size; i += kThreads / 32 * kQuantized) {
    if (aligned && i + kQuantized <= span.size) {
      step_int8<kElements>(row, span.begin + i, by);
    } else {
      step_int8<1>(row, span.begin + i, by);
    }
  }
}

template <class C>
__device__ void step_span(const AdamwRow& row, const Span& span, const AdamwScalars<C>& by) {
  constexpr int count = kElements * sizeof(float) / sizeof(C);
  const int64_t whole = are_aligned(row) ? span.size / count * count : 0;
  for (int64_t i = threadIdx.x * count; i < whole; i += kThreads * count) step_plain<C, count>(row, span.begin + i, by);
  for (int64_t i = whole + threadIdx.x; i < span.size; i += kThreads) step_plain<C, 1>(row, span.begin + i, by);
}

// The hyperparameters of a stretch's groups.
template <int capacity>
struct GroupsAt {
  GroupsAt(const AdamwStretch& stretch, const AdamwGroup* all) : first(stretch.first_group) {
    memcpy(of, all + first, sizeof(AdamwGroup) * (stretch.end_group - first));
  }
  int64_t first;
  AdamwGroup of[capacity];
};

// One block a chunk; the last block of a parameter counts the step, which all of them have read by then.
template <int most_rows, int most_groups>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ StretchAt<most_rows> grads,
                 const __grid_constant__ GroupsAt<most_groups> groups, const AdamwRow* rows,
                 const __grid_constant__ AdamwShared shared, uint32_t* tickets, Overflow* of_chunk) {
  if (grads.first_chunk + blockIdx.x == 0 && threadIdx.x == 0) tell(shared);
  const bool skipped = is_skipped(shared);
  if (skipped && !shared.report.lines) return;
  const Span span = span_of_block(grads);
  const Row grad = row_at(grads, span.row);
  if (skipped) return overflow_block(grads, grad, span, shared.report, of_chunk, tickets);
  __shared__ AdamwRow row;  // in registers it costs a quarter of them
  __shared__ AdamwScalars<double> wide;
  __shared__ AdamwScalars<float> narrow;
  if (threadIdx.x == 0) {
    row = rows[span.row];
    row.grad = grad.data;
    wide = adamw_scalars<double>(groups.of[row.group - groups.first], *row.step, shared);
    narrow = wide.rounded<float>();
  }
  __syncthreads();
  if (row.param_dtype == Dtype::f64) {
    step_span(row, span, wide);
  } else if (row.scales) {
    step_span_int8(row, span, narrow);
  } else {
    step_span(row, span, narrow);
  }
  const int32_t chunks = chunks_of(row.size, grads.chunk_size);
  if (last_one_out(tickets + span.row, chunks) && threadIdx.x == 0) *row.step += 1;
}

template <int most_rows, int most_groups>
static cudaError_t launch_stretch(const AdamwStretch& stretch, void* const* grads, const AdamwGroup* groups,
                                  const AdamwShared& shared, uint32_t* tickets, Overflow* of_chunk,
                                  cudaStream_t stream) {
  return launch(adamw_kernel<most_rows, most_groups>, stretch.grads.chunks(), stream,
                StretchAt<most_rows>(stretch.grads, grads), GroupsAt<most_groups>(stretch, groups), stretch.rows,
                shared, tickets, of_chunk);
}

cudaError_t adamw_cuda(const AdamwStretch& stretch, void* const* grads, const AdamwGroup* groups,
                       const AdamwShared& shared, uint32_t* tickets, Overflow* of_chunk, cudaStream_t stream) {
  constexpr int few = 16;
  const bool is_small = stretch.grads.rows() <= kSmallStretch && stretch.end_group - stretch.first_group <= few;
  const auto launch_sized =
      is_small ? launch_stretch<kSmallStretch, few> : launch_stretch<Stretch::kMostRows, AdamwStretch::kMostGroups>;
  return launch_sized(stretch, grads, groups, shared, tickets, of_chunk, stream);
}

}  // namespace mpk
