// The CPU loops of a step. A rule's *_cpu.cpp has them compiled by MPK_STEP_ON_CPU, once per instruction set.
//
// step_span: one span of one row. It calls one of these:
//   step_elements: whole vectors, then the rest by step_copies, which fills up a vector; each by step_whole.
//     step_whole: doubles in place, others in blocks that step_arrays unpacks to fp32, steps and packs again.
//   step_coded: blocks of 8-bit states, each by step_coded_block; the last one by step_copies, if it isn't full.
// All come down to step_vectors, which calls the rule.
#pragma once

#include <algorithm>

#include "common/simd.h"
#include "step/step.h"

namespace mpk::MPK_ISA {

// A parameter's arrays, from some element on; null where the row has none.
template <class Rule>
struct Arrays {
  char *param, *states[Rule::kStates], *master, *grad;
};

// Calls body(array, width) for each array that a step writes.
template <class Rule, class Body>
static MPK_FN void for_each_written(const StepRow& row, Arrays<Rule>& arrays, const Body& body) {
  body(arrays.param, width_of(row.param_dtype));
  for (char*& state : arrays.states) body(state, row.scales ? 1 : width_of(row.state_dtype));
  body(arrays.master, width_of(row.master_kind));
}

template <class Rule, class Body>
static MPK_FN void for_each_array(const StepRow& row, Arrays<Rule>& arrays, const Body& body) {
  for_each_written(row, arrays, body);
  body(arrays.grad, width_of(row.grad_dtype));
}

template <class Rule>
static MPK_FN Arrays<Rule> advanced(const StepRow& row, Arrays<Rule> arrays, int64_t elements) {
  for_each_array(row, arrays, [&](char*& array, int64_t width) {
    if (array) array += elements * width;
  });
  return arrays;
}

template <class Rule>
static Arrays<Rule> arrays_of(const StepRow& row) {
  const auto bytes = [](const void* array) { return const_cast<char*>(static_cast<const char*>(array)); };
  Arrays<Rule> arrays{bytes(row.param), {}, bytes(row.master), bytes(row.grad)};
  for (int i = 0; i < Rule::kStates; ++i) arrays.states[i] = bytes(row.states[i]);
  return arrays;
}

// What the formula reads and overwrites, in whole vectors.
template <class Rule, class T>
struct Numbers {
  T* param;
  const T* grad;
  T* states[Rule::kStates];
};

// Returns each scalar in all lanes. Compilers would spread a scalar anew for each vector: a store may have changed it.
template <class F, class Rule, class C>
static MPK_FN StepScalars<Rule, F> spread(const StepScalars<Rule, C>& scalars) {
  return converted<F>(scalars, [](C scalar) { return scalar - F{}; });  // a sum would make +0 of -0
}

// Stores kept(k, state) in the place of each state k.
template <bool has_optional, class Rule, class T, class F, class Kept>
static MPK_FN void step_vectors(const Numbers<Rule, T>& numbers, int64_t size, const StepScalars<Rule, F>& scalars,
                                const Kept& kept) {
  constexpr int count = has_optional ? Rule::kStates : Rule::kNeeded;
  const Numbers<Rule, T> from = numbers;
  for (int64_t i = 0; i < size; i += kLanesOf<T>) {
    F param = load(from.param + i), states[Rule::kStates]{};
    for_each_index<count>([&](auto k) { states[k] = load(from.states[k] + i); });
    Rule::step(param, load(from.grad + i) * scalars.grad_factor, states, has_optional, scalars.rule);
    store(from.param + i, param);
    for_each_index<count>([&](auto k) { store(from.states[k] + i, kept(k, states[k])); });
  }
}

template <class Rule, class T, class F, class Kept>
static MPK_FN void step_vectors(const Numbers<Rule, T>& numbers, int64_t size, const StepScalars<Rule, F>& scalars,
                                const Kept& kept) {
  numbers.states[Rule::kStates - 1] ? step_vectors<true>(numbers, size, scalars, kept)
                                    : step_vectors<false>(numbers, size, scalars, kept);
}

// How many 16-bit numbers are unpacked, stepped and packed at a time, in three loops. In one loop, loads and stores are
// so far apart that a core's window holds only two or three vectors and waits: one loop took 1.3 to 1.5 times as long
// (Zen 3).
inline constexpr int kUnpacked = 256;

// Calls body(array, i) for each vector, with the array's own type.
template <class Array, class Body>
static MPK_FN void for_each_vector(Dtype dtype, Array* array, int64_t size, const Body& body) {
  const auto run = [&](auto* halves) {
    for (int64_t i = 0; i < size; i += kLanes) body(halves + i, i);
  };
  dtype == Dtype::b16 ? run(reinterpret_cast<bf16*>(array)) : run(reinterpret_cast<fp16*>(array));
}

// Returns the array itself if it holds fp32, else its numbers in `to`.
static MPK_FN float* unpack(Dtype dtype, char* array, int64_t size, float* to) {
  if (!array || dtype == Dtype::f32) return reinterpret_cast<float*>(array);
  for_each_vector(dtype, array, size, [&](auto* halves, int64_t i) { store(to + i, load(halves)); });
  return to;
}

static MPK_FN void pack(Dtype dtype, const float* from, int64_t size, char* array) {
  if (!array || dtype == Dtype::f32) return;
  for_each_vector(dtype, array, size, [&](auto* halves, int64_t i) { store(halves, load(from + i)); });
}

static MPK_FN Words join(const bf16* weight, Words remainder) {
  return join_bf16(Split<Words>{widen(load_bytes<Halves>(weight)), remainder});
}
static MPK_FN Words join(const fp16* weight, Words remainder) {
  return join_fp16<Floats>({load_bytes<Halves>(weight), remainder});
}

// Returns the true weights. A master in fp32 is not copied.
template <class Rule>
static MPK_FN float* unpack_weights(const StepRow& row, const Arrays<Rule>& arrays, int64_t size, float* to) {
  if (row.master_kind == Master::none) return unpack(row.param_dtype, arrays.param, size, to);
  if (row.master_kind == Master::fp32) {
    auto* const masters = reinterpret_cast<float*>(arrays.master);
    for_each_vector(row.param_dtype, arrays.param, size, [&](auto* weight, int64_t i) {
      store(masters + i, copied_master(row.param_dtype, load(masters + i), load(weight)));
    });
    return masters;
  }
  for_each_vector(row.param_dtype, arrays.param, size, [&](auto* weight, int64_t i) {
    store(to + i, bit_cast<Floats>(join(weight, widen(load_bytes<Halves>(arrays.master + 2 * i)))));
  });
  return to;
}

static MPK_FN void split(Words master, bf16* weight, char* remainder) {
  const Split<Words> split = split_bf16(master);
  store_bytes(weight, narrow(split.weight));
  store_bytes(remainder, narrow(split.remainder));
}
static MPK_FN void split(Words master, fp16* weight, char* remainder) {
  const SplitFp16<Floats> split = split_fp16<Floats>(master);
  store_bytes(weight, split.weight);
  store_bytes(remainder, narrow(split.remainder));
}

template <class Rule>
static MPK_FN void pack_weights(const StepRow& row, const float* from, int64_t size, const Arrays<Rule>& arrays) {
  if (row.master_kind != Master::split) return pack(row.param_dtype, from, size, arrays.param);
  for_each_vector(row.param_dtype, arrays.param, size,
                  [&](auto* weight, int64_t i) { split(load_bytes<Words>(from + i), weight, arrays.master + 2 * i); });
}

template <class Rule>
static void step_arrays(const StepRow& row, const Arrays<Rule>& arrays, int64_t size,
                        const StepScalars<Rule, Floats>& scalars) {
  alignas(64) float unpacked[2 + Rule::kStates][kUnpacked];
  Numbers<Rule, float> numbers{
      unpack_weights(row, arrays, size, unpacked[0]), unpack(row.grad_dtype, arrays.grad, size, unpacked[1]), {}};
  for (int i = 0; i < Rule::kStates; ++i)
    numbers.states[i] = unpack(row.state_dtype, arrays.states[i], size, unpacked[2 + i]);
  step_vectors(numbers, size, scalars, [](auto, Floats state) { return state; });
  pack_weights(row, numbers.param, size, arrays);
  for (int i = 0; i < Rule::kStates; ++i) pack(row.state_dtype, numbers.states[i], size, arrays.states[i]);
}

template <class Rule>
static void step_whole(const StepRow& row, const Arrays<Rule>& arrays, int64_t size,
                       const StepScalars<Rule, Floats>& scalars) {
  const bool is_fp32 = row.param_dtype == Dtype::f32 && row.grad_dtype == Dtype::f32 && row.state_dtype == Dtype::f32;
  const int64_t block = is_fp32 ? size : kUnpacked;
  for (int64_t i = 0; i < size; i += block) {
    step_arrays(row, advanced(row, arrays, i), std::min(block, size - i), scalars);
  }
}

template <class Rule>
static void step_whole(const StepRow&, const Arrays<Rule>& arrays, int64_t size,
                       const StepScalars<Rule, Doubles>& scalars) {
  const auto doubles = [](char* array) { return reinterpret_cast<double*>(array); };
  Numbers<Rule, double> numbers{doubles(arrays.param), doubles(arrays.grad), {}};
  for (int i = 0; i < Rule::kStates; ++i) numbers.states[i] = doubles(arrays.states[i]);
  step_vectors(numbers, size, scalars, [](auto, Doubles state) { return state; });
}

// Copies `count` elements, and repeats them to fill whole vectors: the largest of them stays the same. Calls
// step(copies, size), and copies back what that has written.
template <class Rule, class Step>
static void step_copies(const StepRow& row, Arrays<Rule> arrays, int64_t count, int64_t lanes, const Step& step) {
  const int64_t whole = (count + lanes - 1) / lanes * lanes;
  alignas(64) char copies[3 + Rule::kStates][kUnpacked * sizeof(float)];
  Arrays<Rule> copied = arrays;
  char (*next)[sizeof copies[0]] = copies;
  for_each_array(row, copied, [&](char*& array, int64_t width) {
    char* const copy = *next++;
    if (!array) return;
    memcpy(copy, array, count * width);
    for (int64_t filled = count, more; filled < whole; filled += more) {
      more = std::min(filled, whole - filled);
      memcpy(copy + filled * width, copy, more * width);
    }
    array = copy;
  });
  step(copied, whole);
  next = copies;
  for_each_written(row, arrays, [&](char* array, int64_t width) {
    const char* const copy = *next++;
    if (array) memcpy(array, copy, count * width);
  });
}

template <class F, class Rule, class C>
static void step_elements(const StepRow& row, const Arrays<Rule>& arrays, int64_t size,
                          const StepScalars<Rule, C>& scalars) {
  constexpr int64_t lanes = kLanesOf<C>;
  const int64_t whole = size / lanes * lanes;
  const StepScalars<Rule, F> in_lanes = spread<F>(scalars);
  const auto step_one = [&](const Arrays<Rule>& vector, int64_t) { step_whole(row, vector, lanes, in_lanes); };
  step_whole(row, arrays, whole, in_lanes);
  if (whole < size) step_copies(row, advanced(row, arrays, whole), size - whole, lanes, step_one);
}

template <Sign sign>
static void decode_block(const int8_t* codes, int64_t size, float scale, float* values) {
  for (int64_t i = 0; i < size; i += kLanes) store(values + i, decode<sign>(load(codes + i), scale));
}

// Takes the bits of floats without a sign, and returns the largest float. One instruction compares bits as integers,
// and a NaN's bits are the largest.
static float largest_of(Words magnitudes) {
  uint32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max<uint32_t>(largest, magnitudes[lane]);
  return bit_cast<float>(largest);
}

// Steps kQuantized elements or fewer. Decoding and encoding have loops of their own, like unpacking (kUnpacked). The
// scales of the states lie `stride` apart.
template <bool has_optional, class Rule>
static void step_coded_block(const StepRow& row, const Arrays<Rule>& arrays, int64_t size, float* scales,
                             int64_t stride, const StepScalars<Rule, Floats>& scalars) {
  alignas(64) float unpacked[2 + Rule::kStates][kQuantized];
  Numbers<Rule, float> numbers{
      unpack_weights(row, arrays, size, unpacked[0]), unpack(row.grad_dtype, arrays.grad, size, unpacked[1]), {}};
  const auto codes = [&](int k) { return reinterpret_cast<int8_t*>(arrays.states[k]); };
  constexpr int count = has_optional ? Rule::kStates : Rule::kNeeded;
  for_each_index<count>([&](auto k) {
    numbers.states[k] = unpacked[2 + k];
    decode_block<Rule::kSigns[k]>(codes(k), size, scales[k * stride], numbers.states[k]);
  });
  Words largest[Rule::kStates]{};
  step_vectors<has_optional>(numbers, size, scalars, [&](auto k, Floats state) {
    const Floats number = coded_number<Rule::kSigns[k]>(state);  // if a root, the formula has taken it, too
    largest[k] = larger(largest[k], coded_magnitude<Rule::kSigns[k]>(number));
    return number;
  });
  pack_weights(row, numbers.param, size, arrays);
  float inverse[Rule::kStates];
  for (int k = 0; k < count; ++k) inverse[k] = inverse_of(scales[k * stride] = scale_of(largest_of(largest[k])));
  for (int64_t i = 0; i < size; i += kLanes)
    for_each_index<count>([&](auto k) {
      store(codes(k) + i, encode<Rule::kSigns[k], SquareRoot<Floats>>(load(numbers.states[k] + i), inverse[k]));
    });
}

template <class Rule>
static void step_coded(const StepRow& row, const Span& span, const Arrays<Rule>& arrays,
                       const StepScalars<Rule, Floats>& scalars) {
  for (int64_t i = 0; i < span.size; i += kQuantized) {
    const Arrays<Rule> block = advanced(row, arrays, i);
    float* const scales = row.scales + (span.begin + i) / kQuantized;
    const auto step = [&](const Arrays<Rule>& whole, int64_t size) {
      arrays.states[Rule::kStates - 1]
          ? step_coded_block<true>(row, whole, size, scales, scales_of(row.size), scalars)
          : step_coded_block<false>(row, whole, size, scales, scales_of(row.size), scalars);
    };
    const int64_t left = span.size - i;
    left < kQuantized ? step_copies(row, block, left, kLanes, step) : step(block, kQuantized);
  }
}

template <class Rule>
void step_span(const StepRow& row, const Span& span, const StepScalars<Rule, double>& scalars) {
  const Arrays<Rule> arrays = advanced(row, arrays_of<Rule>(row), span.begin);
  if (row.param_dtype == Dtype::f64) {
    step_elements<Doubles>(row, arrays, span.size, scalars);
  } else if (row.scales) {
    step_coded(row, span, arrays, spread<Floats>(rounded<float>(scalars)));
  } else {
    step_elements<Floats>(row, arrays, span.size, rounded<float>(scalars));
  }
}

}  // namespace mpk::MPK_ISA

#define MPK_STEP_ON_CPU(Rule)                                                             \
  template void mpk::MPK_ISA::step_span<mpk::Rule>(const mpk::StepRow&, const mpk::Span&, \
                                                   const mpk::StepScalars<mpk::Rule, double>&);
