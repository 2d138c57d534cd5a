// Some elements of a row in a CUDA thread: as they lie in memory, widened, stepped and stored.
#pragma once

#include "adamw/adamw_arrays.h"
#include "common/elements.h"

namespace mpk {

template <int count>
struct RawWeights {
  Raw<count> param, master;
};

template <int count>
__device__ RawWeights<count> load_weights(const Arrays& arrays, uint32_t first) {
  RawWeights<count> raw;
  raw.param = load_raw<count>(arrays.param_dtype, arrays.param, first);
  if (arrays.master_kind != Master::none) {
    raw.master = load_raw<count>(arrays.master_kind == Master::fp32 ? Dtype::f32 : Dtype::b16, arrays.master, first);
  }
  return raw;
}

template <int count>
__device__ Elements<float, count> joined(Dtype dtype, const RawWeights<count>& raw) {
  Elements<float, count> master;
  const auto join_all = [&](const auto& join) {
    for (int i = 0; i < count; ++i)
      master.at[i] = bit_cast<float>(join(Split<uint32_t>{raw.param.halves.at[i], raw.master.halves.at[i]}));
  };
  dtype == Dtype::b16 ? join_all(join_bf16<uint32_t>) : join_all(join_fp16<float>);
  return master;
}

template <int count>
__device__ Elements<float, count> widened_weights(const Arrays& arrays, const RawWeights<count>& raw) {
  if (arrays.master_kind == Master::split) return joined(arrays.param_dtype, raw);
  auto weights = widened(arrays.param_dtype, raw.param);
  if (arrays.master_kind == Master::fp32) {
    const auto copies = bit_cast<Elements<float, count>>(raw.master.words);
    for (int i = 0; i < count; ++i) weights.at[i] = copied_master(arrays.param_dtype, copies.at[i], weights.at[i]);
  }
  return weights;
}

template <int count>
__device__ void store_weights(const Arrays& arrays, uint32_t first, const Elements<float, count>& weights) {
  if (arrays.master_kind == Master::split) {
    Elements<uint16_t, count> rounded, remainder;
    const auto split_all = [&](const auto& split) {
      for (int i = 0; i < count; ++i) {
        const auto halves = split(bit_cast<uint32_t>(weights.at[i]));
        rounded.at[i] = static_cast<uint16_t>(halves.weight);
        remainder.at[i] = static_cast<uint16_t>(halves.remainder);
      }
    };
    arrays.param_dtype == Dtype::b16 ? split_all(split_bf16<uint32_t>) : split_all(split_fp16<float>);
    store(reinterpret_cast<uint16_t*>(arrays.param) + first, rounded);
    store(reinterpret_cast<uint16_t*>(arrays.master) + first, remainder);
    return;
  }
  if (arrays.master_kind == Master::fp32) store_as(Dtype::f32, arrays.master, first, weights);
  store_as(arrays.param_dtype, arrays.param, first, weights);
}

template <class C, int count>
struct Moments {
  Elements<C, count> exp_avg, exp_avg_sq, largest;
};

template <class C, int count>
__device__ void step(Elements<C, count>& weights, const Elements<C, count>& grads, Moments<C, count>& moments,
                     bool amsgrad, const AdamwScalars<C>& by) {
  for (int i = 0; i < count; ++i) {
    const AdamwElement<C> before{weights.at[i], moments.exp_avg.at[i], moments.exp_avg_sq.at[i], moments.largest.at[i]};
    const AdamwElement<C> after = adamw(before, grads.at[i], amsgrad, by);
    weights.at[i] = after.param;
    moments.exp_avg.at[i] = after.exp_avg;
    moments.exp_avg_sq.at[i] = after.exp_avg_sq;
    moments.largest.at[i] = after.max_exp_avg_sq;
  }
}

// What a thread reads for `count` elements, as it lies in memory.
template <int count, class State>
struct RawElements {
  RawWeights<count> weights;
  Raw<count> grads;
  State exp_avg, exp_avg_sq, largest;
};

template <int count, class LoadState>
__device__ auto load_elements(const Arrays& arrays, uint32_t first, const LoadState& load_state) {
  RawElements<count, decltype(load_state(arrays.exp_avg))> raw;
  raw.weights = load_weights<count>(arrays, first);
  raw.grads = load_raw<count>(arrays.grad_dtype, arrays.grad, first);
  raw.exp_avg = load_state(arrays.exp_avg);
  raw.exp_avg_sq = load_state(arrays.exp_avg_sq);
  if (arrays.amsgrad) raw.largest = load_state(arrays.largest);
  return raw;
}

// Between loads and uses, and behind the stores, where whole warps go through packs. Else ptxas moves the last loads
// behind the first uses, and has loads wait for one another on behalf of the stores before (seen in 13.0, sm_90).
template <int count>
__device__ void keep_order() {
  if constexpr (count > 1) __syncwarp();
}

template <int count, class State>
__device__ void step(const Arrays& arrays, uint32_t first, const RawElements<count, State>& raw,
                     Moments<float, count>& moments, const AdamwScalars<float>& by) {
  auto weights = widened_weights(arrays, raw.weights);
  step(weights, widened(arrays.grad_dtype, raw.grads), moments, arrays.amsgrad, by);
  store_weights(arrays, first, weights);
}

}  // namespace mpk
