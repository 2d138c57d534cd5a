#include <atomic>

#include "common/chunks_torch.h"
#include "common/registration_torch.h"
#include "common/stream_torch.h"
#include "grads/unscale.h"

namespace mpk {

static constexpr const char* kOp = "unscale_";

struct UnscaleArguments {
  explicit UnscaleArguments(const StableIValue* stack) : grads(stack[0]), found_inf(stack[1]), inv_scale(stack[2]) {
    require(found_inf.is_fp32_scalar(), kOp, "found_inf is not a single fp32");
    require(inv_scale.is_fp32_scalar(), kOp, "inv_scale is not a single fp32");
    require(inv_scale.device() == found_inf.device(), kOp, "inv_scale is not on the device of found_inf");
    grads.flatten(kOp, "grads", found_inf, /*will_write=*/true);
  }
  TensorList grads;
  Tensor found_inf;
  Tensor inv_scale;
};

static void unscale_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  UnscaleArguments arguments(stack);
  const float inv_scale = *static_cast<const float*>(arguments.inv_scale.const_data());
  const Table table = lay_out(arguments.grads.rows(), kCpuChunk);
  const auto unscale_span = MPK_BEST(unscale_span);
  std::atomic<bool> bad{false};
  parallel_for_chunks(table, arguments.grads.elements(), [&](const Row& row, const Span& span) {
    if (unscale_span(row.dtype, row.at(span.begin), span.size, inv_scale)) bad.store(true, std::memory_order_relaxed);
  });
  if (bad) *arguments.found_inf.data<float>() = 1.0f;
  arguments.grads.return_copies();
}
MPK_CPU_KERNEL(kOp, unscale_on_cpu)

#ifdef MPK_CUDA
static void unscale_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  UnscaleArguments arguments(stack);
  const OnDeviceOf device(arguments.found_inf);
  const Table table = lay_out_on_cuda(arguments.grads.rows());
  const RowMemory<Row> memory(table, arguments.found_inf);
  require_success(unscale_cuda(table, memory.get(), arguments.found_inf.data<float>(),
                               static_cast<const float*>(arguments.inv_scale.const_data()), device.stream()),
                  kOp);
  arguments.grads.return_copies();
}
MPK_CUDA_KERNEL(kOp, unscale_on_cuda)
#endif

}  // namespace mpk
