// The arrays of a row as a CUDA block goes through them, and the kinds of rows that have loops of their own.
#pragma once

#include "common/cuda.h"
#include "step/step.h"

namespace mpk {

// A thread takes two packs of adjacent elements at once, or, where arrays are not aligned alike, two or four single
// elements. A pack is 16 bytes in fp32, 8 in 16-bit formats, 4 in codes. So a warp touches adjacent bytes in every
// format, and formats mix as long as all arrays begin at the same place of a pack.
static constexpr uint32_t kPack = 4, kPacks = 2;

// A row's arrays from a span's first element on.
template <class Rule>
struct Arrays {
  char *param, *states[Rule::kStates], *master;
  const char* grad;
  Dtype param_dtype, grad_dtype, state_dtype;
  Master master_kind;
  bool has_optional;

  __device__ bool has_state(int i) const { return i < Rule::kNeeded || has_optional; }
};

template <class Rule, Needs needs>
__device__ Arrays<Rule> arrays_at(const StepRow& row, int64_t begin) {
  const auto at = [&](void* array, int64_t width) { return static_cast<char*>(array) + begin * width; };
  const int64_t state_width = row.scales ? 1 : width_of(row.state_dtype);
  Arrays<Rule> arrays;
  arrays.param = at(row.param, width_of(row.param_dtype));
  for_each_index<Rule::kStates>([&](auto i) { arrays.states[i] = at(row.states[i], state_width); });
  arrays.master = at(row.master, width_of(row.master_kind));
  arrays.grad = static_cast<const char*>(row.grad) + begin * width_of(row.grad_dtype);
  arrays.param_dtype = row.param_dtype;
  arrays.grad_dtype = row.grad_dtype;
  arrays.state_dtype = row.state_dtype;
  arrays.master_kind = row.master_kind;
  arrays.has_optional =
      Rule::kNeeded < Rule::kStates && (needs == Needs::all || !Rule::kOptionalIsRare) && row.states[Rule::kStates - 1];
  return arrays;
}

// Returns how many elements lie before the first pack; kPack if arrays differ in that.
template <class Rule>
__device__ int head_of(const Arrays<Rule>& arrays, int64_t state_width) {
  const auto head = [](const void* array, int64_t width) {
    const auto address = reinterpret_cast<uintptr_t>(array);
    return static_cast<int>(-(width == 4 ? address / 4 : width == 2 ? address / 2 : address) % kPack);
  };
  const int first = head(arrays.param, width_of(arrays.param_dtype));
  const auto agrees = [&](const void* array, int64_t width) { return head(array, width) == first; };
  bool all = agrees(arrays.grad, width_of(arrays.grad_dtype));
  for_each_index<Rule::kStates>(
      [&](auto i) { all = all && (!arrays.has_state(i) || agrees(arrays.states[i], state_width)); });
  all = all && (arrays.master_kind == Master::none || agrees(arrays.master, width_of(arrays.master_kind)));
  return all ? first : kPack;
}

// A kind of row whose dtypes the compiler knows, so that its loops ask for none.
template <Dtype param, Dtype grad, Dtype state, Master master>
struct Known {
  static constexpr bool in_packs = true;
  static constexpr int singles = 4;
  template <class Rule>
  static __device__ bool fits(const Arrays<Rule>& arrays) {
    return arrays.param_dtype == param && arrays.grad_dtype == grad && arrays.state_dtype == state &&
           arrays.master_kind == master && !(Rule::kOptionalIsRare && arrays.has_optional);
  }
  template <class Rule>
  static __device__ Arrays<Rule> known(Arrays<Rule> arrays) {
    arrays.param_dtype = param;
    arrays.grad_dtype = grad;
    arrays.state_dtype = state;
    arrays.master_kind = master;
    if (Rule::kOptionalIsRare) arrays.has_optional = false;
    return arrays;
  }
};

using Fp32Rows = Known<Dtype::f32, Dtype::f32, Dtype::f32, Master::none>;
using SplitRows = Known<Dtype::b16, Dtype::b16, Dtype::f32, Master::split>;

// All other rows. Their loops take single elements, because packs of an unknown width would need twice the registers.
struct Unknown {
  static constexpr bool in_packs = false;
  static constexpr int singles = 2;
  template <class Rule>
  static __device__ bool fits(const Arrays<Rule>&) {
    return true;
  }
  template <class Rule>
  static __device__ Arrays<Rule> known(const Arrays<Rule>& arrays) {
    return arrays;
  }
};

// Calls run(kind) with the first kind that fits the arrays.
template <class... Kinds, class Rule, class Run>
__device__ void with_kind(const Arrays<Rule>& arrays, const Run& run) {
  (void)((Kinds::fits(arrays) && (run(Kinds{}), true)) || ...);
}

}  // namespace mpk
