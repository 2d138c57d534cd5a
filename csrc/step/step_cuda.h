// The CUDA kernel of a step. A rule's *_cuda.cu has it compiled by MPK_STEP_ON_CUDA.
#pragma once

#include "grads/overflow_block.h"
#include "step/step_block.h"

namespace mpk {

using StepStretch = StretchAt<Stretch::kMostRows>;

// The hyperparameters of a launch's groups.
template <class Rule>
struct GroupsOf {
  GroupsOf(const StepLaunch& launched, const StepGroup<Rule>* all) : first(launched.first_group) {
    memcpy(at, all + first, sizeof(StepGroup<Rule>) * (launched.end_group - first));
  }
  int64_t first;
  StepGroup<Rule> at[StepLaunch::kMostGroups];
};

// One block per chunk; the last block of a parameter counts its step up, after all of its blocks have read the count.
template <class Rule, Needs needs>
__global__ void __launch_bounds__(kThreads, needs == Needs::all ? 2 : 3)
    step_kernel(const StepStretch __grid_constant__ grads, const GroupsOf<Rule> __grid_constant__ groups,
                const StepRow* rows, const StepShared __grid_constant__ shared, uint32_t* tickets,
                Overflow* chunk_lines) {
  if (grads.first_chunk + blockIdx.x == 0 && threadIdx.x == 0) write_outcome(shared);
  const Span span = span_of_block(grads);
  __shared__ StepRow row;  // in registers it costs a quarter of them
  __shared__ RowScalars<Rule> scalars;
  if (threadIdx.x == 0) {
    row = rows[span.row];
    row.grad = row_at(grads, span.row).data;
    scalars = row_scalars(row, groups.at[row.group - groups.first], grads.chunk_size, tickets + span.row, shared);
  }
  __syncthreads();
  if (scalars.is_skipped) {
    if (shared.report.lines) overflow_block(grads, grad_of(row), span, shared.report, chunk_lines, tickets);
    return;
  }
  step_chunk<Rule, needs>(row, span, scalars);
  if (last_one_out(scalars.ticket, scalars.chunks) && threadIdx.x == 0) *scalars.step = scalars.steps;
}

template <class Rule, Needs needs>
cudaError_t launch_step(const StepLaunch& launched, void* const* grads, const StepGroup<Rule>* groups,
                        const StepShared& shared, uint32_t* tickets, Overflow* chunk_lines, cudaStream_t stream) {
  return launch(step_kernel<Rule, needs>, launched.grads.chunks(), stream, StepStretch(launched.grads, grads),
                GroupsOf<Rule>(launched, groups), launched.rows, shared, tickets, chunk_lines);
}

template <class Rule>
cudaError_t step_cuda(const StepLaunch& launched, void* const* grads, const StepGroup<Rule>* groups,
                      const StepShared& shared, uint32_t* tickets, Overflow* chunk_lines, cudaStream_t stream) {
  constexpr Needs needs_of_codes = Rule::kIsTuned ? Needs::codes : Needs::all;
  const auto launch_for = launched.needs == Needs::common  ? launch_step<Rule, Needs::common>
                          : launched.needs == Needs::codes ? launch_step<Rule, needs_of_codes>
                                                           : launch_step<Rule, Needs::all>;
  return launch_for(launched, grads, groups, shared, tickets, chunk_lines, stream);
}

}  // namespace mpk

#define MPK_STEP_ON_CUDA(Rule)                                                                                \
  template cudaError_t mpk::step_cuda(const mpk::StepLaunch&, void* const*, const mpk::StepGroup<mpk::Rule>*, \
                                      const mpk::StepShared&, uint32_t*, mpk::Overflow*, cudaStream_t);
