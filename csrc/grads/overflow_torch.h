// Makes the report on the CPU, for overflow_ and for a skipped step of an optimizer.
#pragma once

#include "common/chunks_torch.h"
#include "common/registration_torch.h"
#include "common/stream_torch.h"
#include "grads/overflow.h"

namespace mpk {

inline void overflow_on_cpu(std::vector<Row> rows, const OverflowReport& report) {
  const Table grads = lay_out(rows, kCpuChunk);
  const auto overflow_span = MPK_BEST(overflow_span);
  std::vector<Overflow> chunk_lines(grads.chunks);
  parallel_for_chunks(grads, elements_of(rows), [&](const Row& row, const Span& span) {
    chunk_lines[span.chunk] = overflow_span(row.dtype, row.at(span.begin), span.begin, span.size);
  });
  report.head();
  for (int32_t grad = 0, chunk = 0; grad < grads.count; ++grad) {
    Overflow whole = chunk_lines[chunk++];
    for (const int32_t end = grads.rows[grad].first_chunk + chunks_of(grads.rows[grad].size, grads.chunk_size);
         chunk < end;)
      whole = merge(whole, chunk_lines[chunk++]);
    report.put(grad, whole, grads.rows[grad].size);
  }
}

// Returns the lines of a report tensor about `count` grads.
inline Overflow* overflow_lines(const Tensor& report, int32_t count, const Tensor& on_device_of, const char* op) {
  constexpr int64_t fields = sizeof(Overflow) / sizeof(double);
  require(report.is_strided() && report.dtype() == aoti_torch_dtype_float64() && report.is_contiguous() &&
              report.size() == fields * (1 + count) && report.device() == on_device_of.device(),
          op, "report does not hold six fp64 for a heading and for each grad, on their device");
  return static_cast<Overflow*>(report.data());
}

}  // namespace mpk
