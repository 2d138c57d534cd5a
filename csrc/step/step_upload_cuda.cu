// Copies a new plan's rows to the device, where each of its steps reads them.
#include "common/rows.h"
#include "step/step.h"

namespace mpk {

// One block per row, because constant memory is fast only where all lanes read the same address.
template <int capacity>
__global__ void step_upload_kernel(const PageOf<StepRow, capacity> __grid_constant__ page, int32_t first, KeptRows to) {
  const StepRow& row = page.rows[blockIdx.x];
  const int32_t i = first + static_cast<int32_t>(blockIdx.x), chunks = chunks_of(row.size, page.chunk_size);
  for (int32_t chunk = threadIdx.x; chunk < chunks; chunk += kThreads) to.row_of_chunk[row.first_chunk + chunk] = i;
  if (threadIdx.x == 0) {
    to.rows[i] = row;
    to.grads[i] = grad_of(row);
    to.tickets[i] = to.tickets[i + 1] = 0;
  }
}

cudaError_t step_upload_cuda(const TableOf<StepRow>& table, const KeptRows& to, cudaStream_t stream) {
  constexpr int capacity = kRowsInParameters<StepRow>;
  for (int32_t first = 0; first < table.count; first += capacity) {
    const PageOf<StepRow, capacity> page(table, first);
    const cudaError_t error = launch(step_upload_kernel<capacity>, page.count, stream, page, first, to);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace mpk
