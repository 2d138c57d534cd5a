// How a list of tensors is divided among torch's threads, and among a GPU's blocks.
#pragma once

#include "common/arguments.h"

namespace mpk {

// On the CPU, a chunk is 128 KB of fp32, which fits every L2. A list of small tensors stays on one thread.
inline constexpr int64_t kCpuChunk = 32768;

// Calls body(first, last) for ranges of [0, count), of `grain` or more each, on torch's own threads.
template <class Body>
void on_threads(int64_t count, int64_t grain, const Body& body) {
  const auto run = [](int64_t first, int64_t last, void* body) { (*static_cast<const Body*>(body))(first, last); };
  const AOTITorchError status = torch_parallel_for(0, count, grain, run, const_cast<Body*>(&body));
  require(status == 0, "mpkernels", "a thread of torch's failed; what it raised is on stderr");
}

// Calls body(row, span) for each chunk of the table.
template <class Row, class Body>
void parallel_for_chunks(const TableOf<Row>& table, int64_t elements, const Body& body) {
  const int64_t grain = 1 + table.chunks * kCpuChunk / (elements + 1);
  on_threads(table.chunks, grain, [&](int64_t first, int64_t last) {
    Span span = find_span(table.rows, table.count, static_cast<int32_t>(first), table.chunk_size);
    for (; span.chunk < last; span = next_span(table, span)) body(table.rows[span.row], span);
  });
}

#ifdef MPK_CUDA
// On CUDA, a chunk of 128 KB hides a block's start-up. Chunks are smaller if there would be fewer than 1,024, larger if
// more than 16,384. They depend on sizes alone, so that sums come out alike on all chips.
template <class Row>
TableOf<Row> lay_out_on_cuda(std::vector<Row>& rows) {
  constexpr int64_t enough_bytes = 128 << 10, enough_chunks = 1024, many_chunks = 16384;
  int64_t elements = 0, bytes = 0;
  for (const Row& row : rows) elements += row.size, bytes += bytes_read(row);
  int64_t chunk = 4096;
  const auto are_small = [&] { return bytes / (elements / chunk) < enough_bytes; };
  while (elements / chunk >= 2 * enough_chunks && (are_small() || elements / chunk > many_chunks)) chunk *= 2;
  return lay_out(rows, chunk);
}

// Device memory for a table's rows, allocated only if they don't fit into a launch's parameters.
template <class Row>
class RowMemory {
 public:
  RowMemory(const TableOf<Row>& table, const Tensor& on_device_of) {
    if (table.count > kRowsInParameters<Row>)
      memory_ = std::make_unique<Tensor>(on_device_of.scratch(sizeof(Row) * table.count));
  }
  Row* get() const { return memory_ ? memory_->data<Row>() : nullptr; }

 private:
  std::unique_ptr<Tensor> memory_;
};
#endif

}  // namespace mpk
