// A step of an optimizer over any list of parameters, in one pass: unscale, clip, skip, the rule's formula, states,
// master weight and 16-bit weight. Grads are read once and never written. A rule (rules/) says which states,
// hyperparameters and scalars there are, and what the formula is.
#pragma once

#include "common/cpu.h"
#include "common/table.h"
#include "grads/grad_stats.h"
#include "step/int8.h"
#include "step/skip_and_clip.h"
#include "step/split.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// How the true weight of a parameter is kept: as the parameter itself, in fp32 beside the parameter, or split over the
// parameter and an int16.
enum class Master : int8_t { none, fp32, split };

MPK_FN int64_t width_of(Master kind) { return kind == Master::split ? 2 : 4; }

inline constexpr int kMostStates = 3;

struct StepRow {
  void* param;
  const void* grad;
  void* states[kMostStates];  // null where the rule, or this row, has fewer
  void* master;               // null where there is none
  float* scales;              // of 8-bit states (int8.h): all scales of the first state, then of the next; else null
  float* step;
  int64_t size;
  int64_t group;
  int32_t first_chunk;
  Dtype param_dtype;
  Dtype grad_dtype;
  Dtype state_dtype;  // fp32 if the states have 8 bits, because they are decoded to it
  Master master_kind;
};
static_assert(std::has_unique_object_representations_v<StepRow>);  // so that comparing bytes compares rows

MPK_FN Row grad_of(const StepRow& row) {
  return {const_cast<void*>(row.grad), row.size, row.first_chunk, row.grad_dtype};
}

MPK_FN int64_t bytes_read(const StepRow& row) {
  int64_t states = 0;
  for (const void* state : row.states) states += state != nullptr;
  const int64_t state_width = row.scales ? 1 : width_of(row.state_dtype);
  return row.size * (width_of(row.param_dtype) + width_of(row.grad_dtype) +
                     (row.master ? width_of(row.master_kind) : 0) + state_width * states);
}

template <class Rule>
struct StepGroup {
  typename Rule::Hyperparameters by_value;
  const void* on_device[Rule::kMayBeTensors];  // null where the hyperparameter is no tensor
  Dtype dtypes[Rule::kMayBeTensors];           // of those tensors: fp32 or fp64
  bool maximize;
};

// Returns the group's hyperparameters. Those that are tensors are read from the device.
template <class Rule>
MPK_FN typename Rule::Hyperparameters hyperparameters(const StepGroup<Rule>& group) {
  struct Values {
    double at[sizeof group.by_value / sizeof(double)];
  } values = bit_cast<Values>(group.by_value);
  for_each_index<Rule::kMayBeTensors>([&](auto i) {
    const void* const tensor = group.on_device[i];
    if (!tensor) return;
    values.at[i] =
        group.dtypes[i] == Dtype::f64 ? *static_cast<const double*>(tensor) : *static_cast<const float*>(tensor);
  });
  return bit_cast<typename Rule::Hyperparameters>(values);
}

// What all elements of a parameter share.
template <class Rule, class C>
struct StepScalars {
  C grad_factor;
  typename Rule::template Scalars<C> rule;
};

// Returns the scalars with convert(scalar) in place of each.
template <class To, class Rule, class C, class Convert>
MPK_FN StepScalars<Rule, To> converted(const StepScalars<Rule, C>& scalars, const Convert& convert) {
  constexpr int count = sizeof scalars / sizeof(C);
  struct From {
    C at[count];
  } from = bit_cast<From>(scalars);
  struct Converted {
    To at[count];
  } to;
  for_each_index<count>([&](auto i) { to.at[i] = convert(from.at[i]); });
  return bit_cast<StepScalars<Rule, To>>(to);
}

template <class To, class Rule>
MPK_FN StepScalars<Rule, To> rounded(const StepScalars<Rule, double>& scalars) {
  return converted<To>(scalars, [](double scalar) { return static_cast<To>(scalar); });
}

// steps_before: how many steps the parameter has taken so far.
template <class Rule>
MPK_FN StepScalars<Rule, double> step_scalars(const StepGroup<Rule>& group, float steps_before,
                                              const StepShared& shared) {
  double factor = grad_factor(shared);
  if (group.maximize) factor = -factor;
  return {factor, Rule::scalars(hyperparameters(group), static_cast<double>(steps_before) + 1)};
}

MPK_FOR_EACH_ISA(template <class Rule>
                 void step_span(const StepRow& row, const Span& span, const StepScalars<Rule, double>& scalars))

#ifdef MPK_CUDA
// What the device keeps of a plan, for each step's kernels to read.
struct KeptRows {
  StepRow* rows;  // without `grad`
  Row* grads;     // the grads' part of each row, without `data`
  int32_t* row_of_chunk;
  uint32_t* tickets;  // 0 between launches: one for each row and one more
};

// What the rows need of a kernel. The more a kernel can do, the more registers it takes, and the fewer blocks fit a
// multiprocessor.
enum class Needs { common, codes, all };

template <class Rule>
Needs needs_of(const StepRow* first, const StepRow* end) {
  Needs needs = Needs::common;
  for (const StepRow* row = first; row < end; ++row) {
    const bool has_rare = Rule::kOptionalIsRare && row->states[Rule::kStates - 1];
    if (row->param_dtype == Dtype::f64 || has_rare) return Needs::all;
    if (row->scales) needs = Needs::codes;
  }
  return needs;
}

// The rows of one launch.
struct StepLaunch {
  static constexpr int kMostGroups = 56;

  Stretch grads;
  const StepRow* rows;  // of the whole plan
  int64_t first_group, end_group;
  Needs needs;
};

cudaError_t step_upload_cuda(const TableOf<StepRow>& table, const KeptRows& to, cudaStream_t stream);

// `grads` has the address of each row's grad, and `groups` the hyperparameters of each group: of the whole plan, on the
// host. chunk_lines is scratch, with one entry for each chunk.
template <class Rule>
cudaError_t step_cuda(const StepLaunch& launched, void* const* grads, const StepGroup<Rule>* groups,
                      const StepShared& shared, uint32_t* tickets, Overflow* chunk_lines, cudaStream_t stream);
#endif

}  // namespace mpk
