// What a CUDA block does of a step: one span of one row.
#pragma once

#include "adamw/adamw_int8_block.h"

namespace mpk {

// `count` adjacent elements from each place(k) on, if is_inside(k).
template <int count, int places, class Place, class IsInside>
__device__ void step_plain(const Arrays& arrays, const Place& place, const IsInside& is_inside,
                           const AdamwScalars<float>& by) {
  RawElements<count, Raw<count>> raw[places];
#pragma unroll
  for (int k = 0; k < places; ++k) {
    const auto load_state = [&](const void* array) { return load_raw<count>(arrays.state_dtype, array, place(k)); };
    if (is_inside(k)) raw[k] = load_elements<count>(arrays, place(k), load_state);
  }
  keep_order<count>();
#pragma unroll
  for (int k = 0; k < places; ++k) {
    if (!is_inside(k)) continue;
    Moments<float, count> moments{
        widened(arrays.state_dtype, raw[k].exp_avg), widened(arrays.state_dtype, raw[k].exp_avg_sq), {}};
    if (arrays.amsgrad) moments.largest = widened(arrays.state_dtype, raw[k].largest);
    step(arrays, place(k), raw[k], moments, by);
    store_as(arrays.state_dtype, arrays.exp_avg, place(k), moments.exp_avg);
    store_as(arrays.state_dtype, arrays.exp_avg_sq, place(k), moments.exp_avg_sq);
    if (arrays.amsgrad) store_as(arrays.state_dtype, arrays.largest, place(k), moments.largest);
  }
  keep_order<count>();
}

// Whole rounds of packs, but first what lies before and behind them: so its sizes take no registers from the packs.
template <class Kind>
__device__ __forceinline__ void step_plain(const Arrays& any, uint32_t size, const AdamwScalars<float>& by) {
  constexpr uint32_t round = kThreads * kPack * kPacks;
  const Arrays arrays = Kind::known(any);
  const uint32_t head = Kind::in_packs ? head_of(arrays, width_of(arrays.state_dtype)) : kPack;
  const uint32_t packed = head < kPack && size > head ? (size - head) / round * round : 0, rest = size - packed;
  for (uint32_t i = threadIdx.x; i < rest; i += kThreads * Kind::singles) {
    const auto in_rest = [&](int k) { return i + k * kThreads; };
    const auto place = [&](int k) { return in_rest(k) + (in_rest(k) < head ? 0 : packed); };
    step_plain<1, Kind::singles>(arrays, place, [&](int k) { return in_rest(k) < rest; }, by);
  }
  if constexpr (Kind::in_packs) {
    for (uint32_t i = head + threadIdx.x * kPack; i < head + packed; i += round) {
      step_plain<kPack, kPacks>(arrays, [&](int k) { return i + k * kThreads * kPack; }, [](int) { return true; }, by);
    }
  }
}

static __device__ void step_fp64(const AdamwRow& row, const Span& span, const AdamwScalars<double>& by) {
  for (int64_t i = span.begin + threadIdx.x; i < span.begin + span.size; i += kThreads) {
    const auto at = [&](void* array) { return static_cast<double*>(array) + i; };
    auto weight = load<1>(at(row.param));
    const auto grad = load<1>(static_cast<const double*>(row.grad) + i);
    Moments<double, 1> moments{load<1>(at(row.exp_avg)), load<1>(at(row.exp_avg_sq)), {}};
    if (row.max_exp_avg_sq) moments.largest = load<1>(at(row.max_exp_avg_sq));
    step(weight, grad, moments, row.max_exp_avg_sq, by);
    store(at(row.param), weight);
    store(at(row.exp_avg), moments.exp_avg);
    store(at(row.exp_avg_sq), moments.exp_avg_sq);
    if (row.max_exp_avg_sq) store(at(row.max_exp_avg_sq), moments.largest);
  }
}

// What all elements of a row share. One thread computes it, for that is done in fp64, at a 64th of fp32's speed on some
// chips.
struct RowScalars {
  bool is_skipped;
  float* step;
  float steps;  // what that becomes
  uint32_t* ticket;
  int32_t chunks;  // with a ticket each
  AdamwScalars<float> in_fp32;
  AdamwScalars<double> in_fp64;
};

static __device__ RowScalars row_scalars(const AdamwRow& row, const AdamwGroup& group, int64_t chunk_size,
                                         uint32_t* ticket, const AdamwShared& shared) {
  if (is_skipped(shared)) return {true};
  const AdamwScalars<double> scalars = adamw_scalars<double>(group, *row.step, shared);
  return {false, row.step, *row.step + 1, ticket, chunks_of(row.size, chunk_size), scalars.rounded<float>(), scalars};
}

template <Needs needs>
__device__ void step_chunk(const AdamwRow& row, const Span& span, const RowScalars& by) {
  if constexpr (needs == Needs::all) {
    if (row.param_dtype == Dtype::f64) return step_fp64(row, span, by.in_fp64);
  }
  const AdamwScalars<float> scalars = by.in_fp32;
  const Arrays arrays = arrays_at<needs>(row, span.begin);
  const auto size = static_cast<uint32_t>(span.size);
  if constexpr (needs != Needs::common) {
    if (row.scales) {
      const auto blocks = static_cast<uint32_t>((row.size + kQuantized - 1) / kQuantized);
      float* const scales = row.scales + span.begin / kQuantized;
      return step_coded(arrays, size, scales, blocks, scalars);
    }
  }
  const auto run = [&](auto kind) { step_plain<decltype(kind)>(arrays, size, scalars); };
  if constexpr (needs == Needs::common) {
    with_kind<Fp32Rows, Known<Dtype::f32, Dtype::f32, Dtype::b16, Master::none>, SplitRows,
              Known<Dtype::b16, Dtype::b16, Dtype::b16, Master::split>,
              Known<Dtype::b16, Dtype::f32, Dtype::f32, Master::split>,
              Known<Dtype::b16, Dtype::b16, Dtype::f32, Master::fp32>,
              Known<Dtype::f16, Dtype::f16, Dtype::f32, Master::split>,
              Known<Dtype::f16, Dtype::f16, Dtype::f32, Master::fp32>, Unknown>(arrays, run);
  } else {
    with_kind<Fp32Rows, SplitRows, Unknown>(arrays, run);
  }
}

}  // namespace mpk
