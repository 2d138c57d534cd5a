// What a CUDA block does of a step: one span of one row.
#pragma once

#include "step/int8_block.h"

namespace mpk {

// Steps `count` adjacent elements from each place(k) on, if is_inside(k).
template <int count, int places, class Rule, class Place, class IsInside>
__device__ void step_packs(const Arrays<Rule>& arrays, const Place& place, const IsInside& is_inside,
                           const StepScalars<Rule, float>& scalars) {
  RawElements<Rule, count, Raw<count>> raw[places];
#pragma unroll
  for (int k = 0; k < places; ++k) {
    const auto load_state = [&](const void* array) { return load_raw<count>(arrays.state_dtype, array, place(k)); };
    if (is_inside(k)) load_elements(arrays, place(k), load_state, raw[k]);
  }
  keep_order<count>();
#pragma unroll
  for (int k = 0; k < places; ++k) {
    if (!is_inside(k)) continue;
    States<Rule, float, count> states{};
    for_each_index<Rule::kStates>([&](auto i) {
      if (arrays.has_state(i)) states.at[i] = widened(arrays.state_dtype, raw[k].states[i]);
    });
    step_pack(arrays, place(k), raw[k], states, scalars);
    for_each_index<Rule::kStates>([&](auto i) {
      if (arrays.has_state(i)) store_as(arrays.state_dtype, arrays.states[i], place(k), states.at[i]);
    });
  }
  keep_order<count>();
}

// Steps what lies before and behind the packs first, so that those sizes take no registers while packs are stepped.
template <class Kind, class Rule>
__device__ __forceinline__ void step_plain(const Arrays<Rule>& any, uint32_t size,
                                           const StepScalars<Rule, float>& scalars) {
  constexpr uint32_t round = kThreads * kPack * kPacks;
  const Arrays<Rule> arrays = Kind::known(any);
  const uint32_t head = Kind::in_packs ? head_of(arrays, width_of(arrays.state_dtype)) : kPack;
  const uint32_t packed = head < kPack && size > head ? (size - head) / round * round : 0, rest = size - packed;
  for (uint32_t i = threadIdx.x; i < rest; i += kThreads * Kind::singles) {
    const auto in_rest = [&](int k) { return i + k * kThreads; };
    const auto place = [&](int k) { return in_rest(k) + (in_rest(k) < head ? 0 : packed); };
    step_packs<1, Kind::singles>(arrays, place, [&](int k) { return in_rest(k) < rest; }, scalars);
  }
  if constexpr (Kind::in_packs) {
    for (uint32_t i = head + threadIdx.x * kPack; i < head + packed; i += round) {
      const auto place = [&](int k) { return i + k * kThreads * kPack; };
      step_packs<kPack, kPacks>(arrays, place, [](int) { return true; }, scalars);
    }
  }
}

template <class Rule>
__device__ void step_fp64(const StepRow& row, const Span& span, const StepScalars<Rule, double>& scalars) {
  const bool has_optional = Rule::kNeeded < Rule::kStates && row.states[Rule::kStates - 1];
  for (int64_t i = span.begin + threadIdx.x; i < span.begin + span.size; i += kThreads) {
    const auto at = [&](void* array) { return static_cast<double*>(array) + i; };
    auto weight = load<1>(at(row.param));
    const auto grad = load<1>(static_cast<const double*>(row.grad) + i);
    States<Rule, double, 1> states{};
    const auto for_each_state = [&](const auto& body) {
      for_each_index<Rule::kStates>([&](auto k) {
        if (k < Rule::kNeeded || has_optional) body(k);
      });
    };
    for_each_state([&](auto k) { states.at[k] = load<1>(at(row.states[k])); });
    apply_rule<double>(weight, grad, states, has_optional, scalars);
    store(at(row.param), weight);
    for_each_state([&](auto k) { store(at(row.states[k]), states.at[k]); });
  }
}

// What a block's threads share of its row. One thread computes this, because fp64 runs at a 64th of fp32's speed on
// some chips.
template <class Rule>
struct RowScalars {
  bool is_skipped;
  float* step;
  float steps;  // what *step becomes
  uint32_t* ticket;
  int32_t chunks;  // of the row; the last one to take the ticket counts the step
  StepScalars<Rule, float> in_fp32;
  StepScalars<Rule, double> in_fp64;
};

template <class Rule>
__device__ RowScalars<Rule> row_scalars(const StepRow& row, const StepGroup<Rule>& group, int64_t chunk_size,
                                        uint32_t* ticket, const StepShared& shared) {
  if (is_skipped(shared)) return {true};
  const StepScalars<Rule, double> scalars = step_scalars(group, *row.step, shared);
  return {false, row.step, *row.step + 1, ticket, chunks_of(row.size, chunk_size), rounded<float>(scalars), scalars};
}

template <class Rule, Needs needs>
__device__ void step_chunk(const StepRow& row, const Span& span, const RowScalars<Rule>& row_scalars) {
  if constexpr (needs == Needs::all) {
    if (row.param_dtype == Dtype::f64) return step_fp64(row, span, row_scalars.in_fp64);
  }
  const StepScalars<Rule, float> scalars = row_scalars.in_fp32;
  const Arrays<Rule> arrays = arrays_at<Rule, needs>(row, span.begin);
  const auto size = static_cast<uint32_t>(span.size);
  if constexpr (needs != Needs::common) {
    if (row.scales) {
      float* const scales = row.scales + span.begin / kQuantized;
      return step_coded(arrays, size, scales, static_cast<uint32_t>(scales_of(row.size)), scalars);
    }
  }
  const auto run = [&](auto kind) { step_plain<decltype(kind)>(arrays, size, scalars); };
  if constexpr (needs == Needs::common && Rule::kIsTuned) {
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
