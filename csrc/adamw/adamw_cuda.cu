#include "adamw/adamw_block.h"
#include "grads/overflow_block.h"

namespace mpk {

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
template <Needs needs, int most_rows, int most_groups>
__global__ void __launch_bounds__(kThreads, needs == Needs::all ? 2 : 3)
    adamw_kernel(const __grid_constant__ StretchAt<most_rows> grads,
                 const __grid_constant__ GroupsAt<most_groups> groups, const AdamwRow* rows,
                 const __grid_constant__ AdamwShared shared, uint32_t* tickets, Overflow* of_chunk) {
  if (grads.first_chunk + blockIdx.x == 0 && threadIdx.x == 0) tell(shared);
  const Span span = span_of_block(grads);
  __shared__ AdamwRow row;  // in registers it costs a quarter of them
  __shared__ RowScalars by;
  if (threadIdx.x == 0) {
    row = rows[span.row];
    row.grad = row_at(grads, span.row).data;
    by = row_scalars(row, groups.of[row.group - groups.first], grads.chunk_size, tickets + span.row, shared);
  }
  __syncthreads();
  if (by.is_skipped) {
    if (shared.report.lines) overflow_block(grads, grad_of(row), span, shared.report, of_chunk, tickets);
    return;
  }
  step_chunk<needs>(row, span, by);
  if (last_one_out(by.ticket, by.chunks) && threadIdx.x == 0) *by.step = by.steps;
}

template <Needs needs, int most_rows, int most_groups>
static cudaError_t launch_stretch(const AdamwStretch& stretch, void* const* grads, const AdamwGroup* groups,
                                  const AdamwShared& shared, uint32_t* tickets, Overflow* of_chunk,
                                  cudaStream_t stream) {
  return launch(adamw_kernel<needs, most_rows, most_groups>, stretch.grads.chunks(), stream,
                StretchAt<most_rows>(stretch.grads, grads), GroupsAt<most_groups>(stretch, groups), stretch.rows,
                shared, tickets, of_chunk);
}

template <Needs needs>
static auto launch_sized(const AdamwStretch& stretch) {
  constexpr int few = 16;
  const bool is_small = stretch.grads.rows() <= kSmallStretch && stretch.end_group - stretch.first_group <= few;
  return is_small ? launch_stretch<needs, kSmallStretch, few>
                  : launch_stretch<needs, Stretch::kMostRows, AdamwStretch::kMostGroups>;
}

cudaError_t adamw_cuda(const AdamwStretch& stretch, void* const* grads, const AdamwGroup* groups,
                       const AdamwShared& shared, uint32_t* tickets, Overflow* of_chunk, cudaStream_t stream) {
  const auto launch_for = stretch.needs == Needs::common  ? launch_sized<Needs::common>(stretch)
                          : stretch.needs == Needs::codes ? launch_sized<Needs::codes>(stretch)
                                                          : launch_sized<Needs::all>(stretch);
  return launch_for(stretch, grads, groups, shared, tickets, of_chunk, stream);
}

}  // namespace mpk
