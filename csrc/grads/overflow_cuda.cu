#include "grads/overflow.h"
#include "grads/overflow_block.h"

namespace mpk {

template <class Rows>
__global__ void __launch_bounds__(kThreads)
    overflow_kernel(const Rows __grid_constant__ grads, const float* found_inf,
                    const OverflowReport __grid_constant__ report, Overflow* chunk_lines, uint32_t* tickets) {
  if (*found_inf == 0) return;
  const Span span = span_of_block(grads);
  const Row& row = row_at(grads, span.row);
  overflow_block(grads, row, span, report, chunk_lines, tickets);
}

cudaError_t overflow_cuda(const Table& grads, Row* memory, const float* found_inf, const OverflowReport& report,
                          Overflow* chunk_lines, uint32_t* tickets, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(tickets, 0, sizeof(uint32_t) * grads.count, stream);
  if (error != cudaSuccess) return error;
  return with_rows(grads, memory, stream, [&](const auto& rows) {
    return launch(overflow_kernel<std::decay_t<decltype(rows)>>, grads.chunks, stream, rows, found_inf, report,
                  chunk_lines, tickets);
  });
}

}  // namespace mpk
