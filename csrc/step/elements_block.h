// Some elements of a row in a CUDA thread: as they lie in memory, widened, stepped and stored.
#pragma once

#include "common/elements.h"
#include "step/arrays_block.h"

namespace mpk {

template <int count>
struct RawWeights {
  Raw<count> param, master;
};

template <int count, class Rule>
__device__ RawWeights<count> load_weights(const Arrays<Rule>& arrays, uint32_t first) {
  RawWeights<count> raw;
  raw.param = load_raw<count>(arrays.param_dtype, arrays.param, first);
  if (arrays.master_kind != Master::none) {
    raw.master = load_raw<count>(arrays.master_kind == Master::fp32 ? Dtype::f32 : Dtype::b16, arrays.master, first);
  }
  return raw;
}

template <bool are_numbers, int count>
__device__ Elements<float, count> joined(Dtype dtype, const RawWeights<count>& raw) {
  const auto in_upper_halves = [](const Elements<uint16_t, count>& halves) {
    return bit_cast<Elements<uint32_t, count>>(widened(bit_cast<Elements<bf16, count>>(halves)));
  };
  const auto params = in_upper_halves(raw.param.halves), remainders = in_upper_halves(raw.master.halves);
  Elements<float, count> master;
  const auto join_all = [&](const auto& join) {
    for (int i = 0; i < count; ++i)
      master.at[i] = bit_cast<float>(join(Split<uint32_t>{params.at[i] >> 16, remainders.at[i] >> 16}));
  };
  dtype == Dtype::b16 ? join_all(join_bf16<uint32_t, are_numbers>) : join_all(join_fp16<float>);
  return master;
}

// are_numbers: whether masters that are NaN may come out wrong, but as NaN.
template <bool are_numbers = false, int count, class Rule>
__device__ Elements<float, count> widened_weights(const Arrays<Rule>& arrays, const RawWeights<count>& raw) {
  if (arrays.master_kind == Master::split) return joined<are_numbers>(arrays.param_dtype, raw);
  auto weights = widened(arrays.param_dtype, raw.param);
  if (arrays.master_kind == Master::fp32) {
    const auto copies = bit_cast<Elements<float, count>>(raw.master.words);
    for (int i = 0; i < count; ++i) weights.at[i] = copied_master(arrays.param_dtype, copies.at[i], weights.at[i]);
  }
  return weights;
}

template <bool are_numbers = false, int count, class Rule>
__device__ void store_weights(const Arrays<Rule>& arrays, uint32_t first, const Elements<float, count>& weights) {
  if (arrays.master_kind == Master::split) {
    Elements<uint16_t, count> rounded, remainder;
    const auto split_all = [&](const auto& split) {
      for (int i = 0; i < count; ++i) {
        const auto halves = split(bit_cast<uint32_t>(weights.at[i]));
        rounded.at[i] = static_cast<uint16_t>(halves.weight);
        remainder.at[i] = static_cast<uint16_t>(halves.remainder);
      }
    };
    arrays.param_dtype == Dtype::b16 ? split_all(split_bf16<uint32_t, are_numbers>) : split_all(split_fp16<float>);
    store(reinterpret_cast<uint16_t*>(arrays.param) + first, rounded);
    store(reinterpret_cast<uint16_t*>(arrays.master) + first, remainder);
    return;
  }
  if (arrays.master_kind == Master::fp32) store_as(Dtype::f32, arrays.master, first, weights);
  store_as(arrays.param_dtype, arrays.param, first, weights);
}

template <class Rule, class C, int count>
struct States {
  Elements<C, count> at[Rule::kStates];
};

// Number: what the formula computes with.
template <class Number, class Rule, class C, int count>
__device__ void apply_rule(Elements<C, count>& weights, const Elements<C, count>& grads, States<Rule, C, count>& states,
                           bool has_optional, const StepScalars<Rule, C>& scalars) {
  for (int i = 0; i < count; ++i) {
    Number weight = weights.at[i], grad = grads.at[i] * scalars.grad_factor, element_states[Rule::kStates];
    for_each_index<Rule::kStates>([&](auto k) { element_states[k] = states.at[k].at[i]; });
    Rule::step(weight, grad, element_states, has_optional, scalars.rule);
    weights.at[i] = static_cast<C>(weight);
    for_each_index<Rule::kStates>([&](auto k) { states.at[k].at[i] = static_cast<C>(element_states[k]); });
  }
}

// What a thread reads for `count` elements, as it lies in memory.
template <class Rule, int count, class State>
struct RawElements {
  RawWeights<count> weights;
  Raw<count> grads;
  State states[Rule::kStates];
};

template <int count, class Rule, class State, class LoadState>
__device__ void load_elements(const Arrays<Rule>& arrays, uint32_t first, const LoadState& load_state,
                              RawElements<Rule, count, State>& raw) {
  raw.weights = load_weights<count>(arrays, first);
  raw.grads = load_raw<count>(arrays.grad_dtype, arrays.grad, first);
  for_each_index<Rule::kStates>([&](auto i) {
    if (arrays.has_state(i)) raw.states[i] = load_state(arrays.states[i]);
  });
}

// Called between loads and uses, and after stores, where warps go through packs. Else ptxas moves the last loads behind
// the first uses, and makes loads wait for one another because of earlier stores (13.0, sm_90).
template <int count>
__device__ void keep_order() {
  if constexpr (count > 1) __syncwarp();
}

template <class Rule, int count, class State>
__device__ void step_pack(const Arrays<Rule>& arrays, uint32_t first, const RawElements<Rule, count, State>& raw,
                          States<Rule, float, count>& states, const StepScalars<Rule, float>& scalars) {
  auto weights = widened_weights(arrays, raw.weights);
  apply_rule<float>(weights, widened(arrays.grad_dtype, raw.grads), states, arrays.has_optional, scalars);
  store_weights(arrays, first, weights);
}

}  // namespace mpk
