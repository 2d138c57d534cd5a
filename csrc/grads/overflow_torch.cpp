#include "grads/overflow_torch.h"

namespace mpk {

static constexpr const char* kOp = "overflow_";

struct OverflowArguments {
  explicit OverflowArguments(const StableIValue* stack)
      : grads(stack[0]),
        found_inf(stack[1]),
        scale(take_optional(stack[2])),
        report(stack[4]),
        to{nullptr, nullptr, stack[3] != 0} {
    require(found_inf.is_fp32_scalar(), kOp, "found_inf is not a single fp32");
    require(!scale || (scale->is_fp32_scalar() && scale->device() == found_inf.device()), kOp,
            "scale is not a single fp32 on the device of found_inf");
    rows = grads.flatten(kOp, "grads", found_inf, /*will_write=*/false);
    to.lines = overflow_lines(report, grads.count(), found_inf, kOp);
    if (scale) to.scale = static_cast<const float*>(scale->const_data());
  }
  const float* flag() const { return static_cast<const float*>(found_inf.const_data()); }

  TensorList grads;
  Tensor found_inf;
  std::unique_ptr<Tensor> scale;
  Tensor report;
  std::vector<Row> rows;
  OverflowReport to;
};

static void overflow_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  OverflowArguments arguments(stack);
  if (*arguments.flag() != 0) overflow_on_cpu(std::move(arguments.rows), arguments.to);
}
MPK_CPU_KERNEL(kOp, overflow_on_cpu)

#ifdef MPK_CUDA
static void overflow_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  OverflowArguments arguments(stack);
  const Tensor& like = arguments.found_inf;
  const OnDeviceOf device(like);
  const Table table = lay_out_on_cuda(arguments.rows);
  const Tensor chunk_lines = like.scratch(sizeof(Overflow) * table.chunks);
  const Tensor tickets = like.scratch(sizeof(uint32_t) * table.count);
  const RowMemory<Row> memory(table, like);
  require_success(overflow_cuda(table, memory.get(), arguments.flag(), arguments.to, chunk_lines.data<Overflow>(),
                                tickets.data<uint32_t>(), device.stream()),
                  kOp);
}
MPK_CUDA_KERNEL(kOp, overflow_on_cuda)
#endif

}  // namespace mpk
