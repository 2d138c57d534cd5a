#include "grads/grad_stats_torch.h"

namespace mpk {

template <class Run>
static void grad_stats(StableIValue* stack, const Run& run) {
  TensorList grads(stack[0]);
  GradStatsCall call(grads.front(), grads.flatten(GradStatsCall::kOp, "grads", grads.front(), /*will_write=*/false));
  run(call);
  stack[0] = call.results.sumsq.release();
  stack[1] = call.results.nonfinite.release();
  stack[2] = call.results.total_sumsq.release();
  stack[3] = call.results.found_inf.release();
}

static void grad_stats_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  grad_stats(stack, [](GradStatsCall& call) { call.on_cpu(); });
}
MPK_CPU_KERNEL(GradStatsCall::kOp, grad_stats_on_cpu)

#ifdef MPK_CUDA
static void grad_stats_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  grad_stats(stack, [](GradStatsCall& call) {
    const OnDeviceOf device(call.like);
    call.on_cuda(device.stream());
  });
}
MPK_CUDA_KERNEL(GradStatsCall::kOp, grad_stats_on_cuda)
#endif

}  // namespace mpk
