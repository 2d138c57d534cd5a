// A call of grad_stats on a list of grads, for the op and for a step that checks its grads first.
#pragma once

#include "common/chunks_torch.h"
#include "common/registration_torch.h"
#include "common/stream_torch.h"
#include "grads/grad_stats.h"

namespace mpk {

// The op's results for `count` tensors.
struct GradStatsResults {
  GradStatsResults(const Tensor& on_device_of, int64_t count)
      : sumsq(on_device_of.new_empty(1, &count, aoti_torch_dtype_float64())),
        nonfinite(on_device_of.new_empty(1, &count, aoti_torch_dtype_float32())),
        total_sumsq(on_device_of.new_empty(0, &count, aoti_torch_dtype_float64())),
        found_inf(on_device_of.new_empty(0, &count, aoti_torch_dtype_float32())) {}

  GradStats pointers() const {
    return {sumsq.data<double>(), nonfinite.data<float>(), total_sumsq.data<double>(), found_inf.data<float>()};
  }

  Tensor sumsq, nonfinite, total_sumsq, found_inf;
};

class GradStatsCall {
 public:
  static constexpr const char* kOp = "grad_stats";

  GradStatsCall(const Tensor& on_device_of, std::vector<Row> grads)
      : like(on_device_of), rows(std::move(grads)), results(on_device_of, static_cast<int64_t>(rows.size())) {}

  void on_cpu() {
    const Table table = lay_out(rows, kCpuChunk);
    const auto grad_stats_span = MPK_BEST(grad_stats_span);
    std::vector<Stats> chunk_stats(table.chunks);
    parallel_for_chunks(table, elements_of(rows), [&](const Row& row, const Span& span) {
      chunk_stats[span.chunk] = grad_stats_span(row.dtype, row.at(span.begin), span.size);
    });

    const GradStats stats = results.pointers();
    Stats total{};
    for (int32_t tensor = 0, chunk = 0; tensor < table.count; ++tensor) {
      Stats tensor_stats{};
      for (int32_t end = chunk + chunks_of(table.rows[tensor].size, kCpuChunk); chunk < end; ++chunk) {
        tensor_stats = merge(tensor_stats, chunk_stats[chunk]);
      }
      stats.sumsq[tensor] = tensor_stats.sumsq;
      stats.nonfinite[tensor] = tensor_stats.bad > 0 ? 1.0f : 0.0f;
      total = merge(total, tensor_stats);
    }
    *stats.total_sumsq = total.sumsq;
    *stats.found_inf = total.bad > 0 ? 1.0f : 0.0f;
  }

#ifdef MPK_CUDA
  void on_cuda(cudaStream_t stream) {
    const Table table = lay_out_on_cuda(rows);
    const Tensor chunk_stats = like.scratch(sizeof(Stats) * table.chunks);
    const Tensor tickets = like.scratch(sizeof(uint32_t) * (table.count + 1));
    const RowMemory<Row> memory(table, like);
    require_success(grad_stats_cuda(table, memory.get(), results.pointers(), chunk_stats.data<Stats>(),
                                    tickets.data<uint32_t>(), stream),
                    kOp);
  }
#endif

  const Tensor& like;
  std::vector<Row> rows;
  GradStatsResults results;
};

}  // namespace mpk
