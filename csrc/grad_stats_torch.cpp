#include "common/torch.h"
#include "grad_stats.h"

namespace mpk {

static constexpr const char* kOp = "grad_stats";

struct GradStatsCall {
  explicit GradStatsCall(const StableIValue* stack)
      : grads(stack[0]),
        sumsq(new_result(1, aoti_torch_dtype_float64())),
        nonfinite(new_result(1, aoti_torch_dtype_float32())),
        total_sumsq(new_result(0, aoti_torch_dtype_float64())),
        found_inf(new_result(0, aoti_torch_dtype_float32())) {
    grads.flatten(kOp, "grads", grads.front(), /*will_write=*/false);
  }

  Tensor new_result(int64_t ndim, int32_t dtype) const {
    const int64_t count = grads.count();
    return grads.front().new_empty(ndim, &count, dtype);
  }
  GradStats pointers() const {
    return {sumsq.data<double>(), nonfinite.data<float>(), total_sumsq.data<double>(), found_inf.data<float>()};
  }
  void put_results(StableIValue* stack) {
    stack[0] = sumsq.release();
    stack[1] = nonfinite.release();
    stack[2] = total_sumsq.release();
    stack[3] = found_inf.release();
  }

  TensorList grads;
  Tensor sumsq, nonfinite, total_sumsq, found_inf;
};

static void grad_stats_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  GradStatsCall call(stack);
  const Table table = call.grads.table(kCpuChunk);
  const auto grad_stats_span = MPK_BEST(grad_stats_span);
  std::vector<Stats> of_chunk(table.chunks);
  parallel_for_chunks(table, call.grads.elements(), [&](const Row& row, const Span& span) {
    of_chunk[span.chunk] = grad_stats_span(row.dtype, row.at(span.begin), span.size);
  });

  const GradStats stats = call.pointers();
  Stats total{};
  for (int32_t tensor = 0, chunk = 0; tensor < table.count; ++tensor) {
    Stats of_tensor{};
    for (int32_t end = chunk + chunks_of(table.rows[tensor].size, kCpuChunk); chunk < end; ++chunk) {
      of_tensor = merge(of_tensor, of_chunk[chunk]);
    }
    stats.sumsq[tensor] = of_tensor.sumsq;
    stats.nonfinite[tensor] = of_tensor.bad > 0 ? 1.0f : 0.0f;
    total = merge(total, of_tensor);
  }
  *stats.total_sumsq = total.sumsq;
  *stats.found_inf = total.bad > 0 ? 1.0f : 0.0f;
  call.put_results(stack);
}
MPK_CPU_KERNEL(kOp, grad_stats_on_cpu)

#ifdef MPK_CUDA
static void grad_stats_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  GradStatsCall call(stack);
  const OnDeviceOf device(call.grads.front());
  const Table table = call.grads.table(cuda_chunk(call.grads.elements()));
  const Tensor of_chunk = call.grads.front().scratch(sizeof(Stats) * table.chunks);
  const Tensor tickets = call.grads.front().scratch(sizeof(uint32_t) * (table.count + 1));
  require_success(
      grad_stats_cuda(table, call.pointers(), of_chunk.data<Stats>(), tickets.data<uint32_t>(), device.stream()), kOp);
  call.put_results(stack);
}
MPK_CUDA_KERNEL(kOp, grad_stats_on_cuda)
#endif

}  // namespace mpk
