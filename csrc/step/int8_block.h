// A CUDA block's step of a span whose states have 8 bits.
#pragma once

#include "step/elements_block.h"
#include "step/unchecked.h"

namespace mpk {

template <Sign sign, int count>
__device__ Elements<float, count> decoded(const Elements<int8_t, count>& codes, float scale) {
  Elements<float, count> values;
  for (int i = 0; i < count; ++i) values.at[i] = decode<sign>(static_cast<float>(codes.at[i]), scale);
  return values;
}

template <Sign sign, int count>
__device__ void store_codes(void* array, uint32_t first, const Elements<float, count>& numbers, float inverse) {
  Elements<int8_t, count> codes;
  for (int i = 0; i < count; ++i)
    codes.at[i] = static_cast<int8_t>(static_cast<uint8_t>(encode<sign, NearRoot>(numbers.at[i], inverse)));
  store(static_cast<int8_t*>(array) + first, codes);
}

template <class Rule, int count>
using RawCoded = RawElements<Rule, count, Elements<int8_t, count>>;

template <class Rule, int count>
__device__ void load_coded(const Arrays<Rule>& arrays, uint32_t first, RawCoded<Rule, count>& raw) {
  const auto load_state = [&](const void* array) {
    return load_once<count>(static_cast<const int8_t*>(array) + first);
  };
  load_elements(arrays, first, load_state, raw);
}

// Leaves the numbers that are to be coded in `states`.
template <class Rule, int count>
__device__ void step_coded_pack(const Arrays<Rule>& arrays, uint32_t first, const RawCoded<Rule, count>& raw,
                                const float (&scales)[Rule::kStates], States<Rule, float, count>& states,
                                const StepScalars<Rule, float>& scalars) {
  for_each_index<Rule::kStates>([&](auto i) {
    if (arrays.has_state(i)) states.at[i] = decoded<Rule::kSigns[i]>(raw.states[i], scales[i]);
  });
  using Number = std::conditional_t<count == 1, float, Unchecked>;
  auto weights = widened_weights<count != 1>(arrays, raw.weights);
  apply_rule<Number>(weights, widened(arrays.grad_dtype, raw.grads), states, arrays.has_optional, scalars);
  bool has_nan = false;
  for (const float weight : weights.at) has_nan |= weight != weight;
  for_each_index<Rule::kStates>([&](auto i) {
    if (!arrays.has_state(i)) return;
    for (float& value : states.at[i].at) {
      value = static_cast<float>(coded_number<Rule::kSigns[i]>(Number(value)));
      has_nan |= value != value;
    }
  });
  if constexpr (count != 1) {
    if (has_nan) {  // then some numbers may be wrong; elements are read anew, which saves registers
      for (int k = 0; k < count; ++k) {
        RawCoded<Rule, 1> element;
        States<Rule, float, 1> its_states{};
        load_coded(arrays, first + k, element);
        step_coded_pack(arrays, first + k, element, scales, its_states, scalars);
        for_each_index<Rule::kStates>([&](auto i) { states.at[i].at[k] = its_states.at[i].at[0]; });
      }
      return;
    }
  }
  store_weights<count != 1>(arrays, first, weights);
}

// A warp takes kQuantized elements from `begin` on, which share a scale in each state. The states' scales lie `blocks`
// apart.
template <int count, int at_once, class Rule>
__device__ void step_coded_block(const Arrays<Rule>& arrays, uint32_t begin, uint32_t size, float* all_scales,
                                 uint32_t blocks, const StepScalars<Rule, float>& scalars) {
  constexpr int shares = kQuantized / 32 / count;
  const uint32_t block = begin / kQuantized;
  const auto place = [&](int k) { return begin + (k * 32 + threadIdx.x % 32) * count; };
  const auto is_inside = [&](int k) { return count > 1 || place(k) < size; };
  const auto for_each_state = [&](const auto& body) {
    for_each_index<Rule::kStates>([&](auto i) {
      if (arrays.has_state(i)) body(i);
    });
  };
  float scales[Rule::kStates]{};
  States<Rule, float, count> all[shares]{};
#pragma unroll
  for (int first = 0; first < shares; first += at_once) {
    RawCoded<Rule, count> raw[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      if (is_inside(first + k)) load_coded(arrays, place(first + k), raw[k]);
    }
    for_each_state([&](auto i) { scales[i] = in_global(all_scales)[block + i * blocks]; });
    keep_order<count>();
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      if (is_inside(first + k)) step_coded_pack(arrays, place(first + k), raw[k], scales, all[first + k], scalars);
    }
  }
  float inverse[Rule::kStates]{};
  for_each_state([&](auto i) {
    uint32_t largest = 0;  // as bits: one instruction finds a warp's largest integer
    for (const States<Rule, float, count>& states : all) {
      for (const float number : states.at[i].at) largest = larger(largest, coded_magnitude<Rule::kSigns[i]>(number));
    }
    scales[i] = scale_of(bit_cast<float>(warp_max(largest)));  // by now all lanes have read the old scale
    inverse[i] = inverse_of(scales[i]);
    if (threadIdx.x % 32 == 0) in_global(all_scales)[block + i * blocks] = scales[i];
  });
#pragma unroll
  for (int k = 0; k < shares; ++k) {
    if (!is_inside(k)) continue;
    for_each_state([&](auto i) { store_codes<Rule::kSigns[i]>(arrays.states[i], place(k), all[k].at[i], inverse[i]); });
  }
}

// No elements are peeled for alignment, because an element's place in its row decides which others share its scale.
template <class Rule>
__device__ void step_coded(const Arrays<Rule>& arrays, uint32_t size, float* scales, uint32_t blocks,
                           const StepScalars<Rule, float>& scalars) {
  constexpr uint32_t round = kThreads / 32 * kQuantized;
  uint32_t i = threadIdx.x / 32 * kQuantized;
  with_kind<Fp32Rows, SplitRows, Unknown>(arrays, [&](auto kind) {
    using Kind = decltype(kind);
    if constexpr (Kind::in_packs) {
      if (head_of(arrays, 1) != 0) return;
      for (; i + kQuantized <= size; i += round)
        step_coded_block<kPack, kPacks>(Kind::known(arrays), i, size, scales, blocks, scalars);
    }
  });
  for (; i < size; i += round) step_coded_block<1, 2>(arrays, i, size, scales, blocks, scalars);
}

}  // namespace mpk
