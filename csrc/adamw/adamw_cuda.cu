#include "adamw/adamw_block.h"
#include "grads/overflow_block.h"

namespace mpk {

// One block a chunk; the last block of a parameter counts the step, which all of them have read by then.
template <Needs needs, class Rows>
__global__ void __launch_bounds__(kThreads, needs == Needs::all ? 2 : 3)
    adamw_kernel(const __grid_constant__ Rows table, const __grid_constant__ AdamwShared shared, uint32_t* tickets,
                 Overflow* of_chunk) {
  if (blockIdx.x == 0 && threadIdx.x == 0) tell(shared);
  const Span span = span_of_block(table);
  const AdamwRow& row = table.rows[span.row];
  __shared__ RowScalars by;
  if (threadIdx.x == 0) by = row_scalars(row, table.chunk_size, tickets + span.row, shared);
  __syncthreads();
  if (by.is_skipped) {
    if (shared.report.lines) overflow_block(table, grad_of(row), span, shared.report, of_chunk, tickets);
    return;
  }
  step_chunk<needs>(row, span, by);
  if (last_one_out(by.ticket, by.chunks) && threadIdx.x == 0) *by.step = by.steps;
}

static Needs needs_of(const TableOf<AdamwRow>& table) {
  Needs needs = Needs::common;
  for (int32_t i = 0; i < table.count; ++i) {
    if (table.rows[i].param_dtype == Dtype::f64 || table.rows[i].max_exp_avg_sq) return Needs::all;
    if (table.rows[i].scales) needs = Needs::codes;
  }
  return needs;
}

cudaError_t adamw_cuda(const TableOf<AdamwRow>& table, AdamwRow* memory, const AdamwShared& shared, uint32_t* tickets,
                       Overflow* of_chunk, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(tickets, 0, sizeof(uint32_t) * table.count, stream);
  if (error != cudaSuccess) return error;
  const auto launch_with = [&](auto kernel, const auto& rows) {
    return launch(kernel, table.chunks, stream, rows, shared, tickets, of_chunk);
  };
  return with_rows(table, memory, stream, [&](const auto& rows) {
    using Rows = std::decay_t<decltype(rows)>;
    switch (needs_of(table)) {
      case Needs::common:
        return launch_with(adamw_kernel<Needs::common, Rows>, rows);
      case Needs::codes:
        return launch_with(adamw_kernel<Needs::codes, Rows>, rows);
      default:
        return launch_with(adamw_kernel<Needs::all, Rows>, rows);
    }
  });
}

}  // namespace mpk
