// The rows of a table as CUDA kernels find them: in the parameters of their launch, or on the device.
#pragma once

#include "common/cuda.h"

namespace mpk {

// Rows of a table in the parameters of a launch (4 KB on every chip, 32,764 bytes since Volta). No device memory need
// be filled or kept alive, and a CUDA graph holds its own copy.
template <class Row, int capacity>
struct PageOf {
  PageOf(const TableOf<Row>& table, int32_t first)
      : count(table.count - first < capacity ? table.count - first : capacity), chunk_size(table.chunk_size) {
    memcpy(rows, table.rows + first, sizeof(Row) * count);
  }
  Row rows[capacity];
  int32_t count;
  int64_t chunk_size;
};
// A launch with 4 KB of parameters takes 2 to 4 us less of the host's time than one with 32 KB (H200).
template <class Row>
inline constexpr int kSmallPage = 3840 / sizeof(Row);

template <class Rows>
__device__ Span span_of_block(const Rows& table) {
  return find_span(table.rows, table.count, static_cast<int32_t>(blockIdx.x), table.chunk_size);
}

// A page's row is read in place, from constant memory. A row in global memory is copied, because the compiler must
// assume that any store changes it.
template <class Row, int capacity>
__device__ const Row& row_at(const PageOf<Row, capacity>& page, int32_t row) {
  return page.rows[row];
}
template <class Row>
__device__ Row row_at(const TableOf<Row>& table, int32_t row) {
  return table.rows[row];
}

// One block per row, because constant memory is fast only where all lanes read the same address.
template <class Row, int capacity>
__global__ void upload_kernel(const PageOf<Row, capacity> __grid_constant__ page, Row* to) {
  if (threadIdx.x == 0) to[blockIdx.x] = page.rows[blockIdx.x];
}

// A stretch of rows that stay on the device, and the addresses of their tensors at this step.
template <int capacity>
struct StretchAt : Stretch {
  StretchAt(const Stretch& stretch, void* const* at) : Stretch(stretch) {
    memcpy(data, at + first_row, sizeof(void*) * rows());
  }
  void* data[capacity];
};
inline constexpr int kSmallStretch = 320;  // 2,560 bytes, so that a launch of grad_stats stays within 4 KB

template <int capacity>
__device__ Span span_of_block(const StretchAt<capacity>& stretch) {
  const int32_t chunk = stretch.first_chunk + static_cast<int32_t>(blockIdx.x);
  return span_at(stretch.table, chunk, stretch.row_of_chunk[chunk], stretch.chunk_size);
}

template <int capacity>
__device__ Row row_at(const StretchAt<capacity>& stretch, int32_t row) {
  Row found = stretch.table[row];
  found.data = stretch.data[row - stretch.first_row];
  return found;
}

// Calls launch_with(rows) once, for any number of tensors. `rows` is a page or, for more rows than a page holds, a
// table in `memory`, into which pages have carried the rows.
template <class Row, class LaunchWith>
cudaError_t with_rows(const TableOf<Row>& table, Row* memory, cudaStream_t stream, const LaunchWith& launch_with) {
  using Large = PageOf<Row, kRowsInParameters<Row>>;
  if (table.count == 0) return cudaSuccess;
  if (table.count <= kSmallPage<Row>) return launch_with(PageOf<Row, kSmallPage<Row>>(table, 0));
  if (table.count <= kRowsInParameters<Row>) return launch_with(Large(table, 0));
  for (int32_t first = 0; first < table.count; first += kRowsInParameters<Row>) {
    const Large page(table, first);
    const cudaError_t error =
        launch(upload_kernel<Row, kRowsInParameters<Row>>, page.count, stream, page, memory + first);
    if (error != cudaSuccess) return error;
  }
  return launch_with(TableOf<Row>{memory, table.count, table.chunks, table.chunk_size});
}

}  // namespace mpk
