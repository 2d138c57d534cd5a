#include "common/chunks_torch.h"
#include "common/registration_torch.h"
#include "common/stream_torch.h"
#include "grads/update_scale.h"

namespace mpk {

static constexpr const char* kOp = "update_scale_";

struct UpdateScaleArguments {
  explicit UpdateScaleArguments(const StableIValue* stack)
      : scale(stack[0]),
        growth_tracker(stack[1]),
        found_inf(stack[2]),
        overflows(stack[6]),
        policy{bit_cast<double>(stack[3]), bit_cast<double>(stack[4]), bit_cast<int64_t>(stack[5]),
               bit_cast<double>(stack[7]), bit_cast<double>(stack[8]), bit_cast<int64_t>(stack[9])} {
    require(scale.is_fp32_scalar(), kOp, "scale is not a single fp32");
    require(found_inf.is_fp32_scalar(), kOp, "found_inf is not a single fp32");
    require(holds_int32(growth_tracker, 1), kOp, "growth_tracker is not a single int32");
    require(holds_int32(overflows, 2), kOp, "overflows is not two adjacent int32");
    for (const Tensor* each : {&growth_tracker, &found_inf, &overflows})
      require(each->device() == scale.device(), kOp, "not everything is on the device of scale");
  }
  ScaleState state() const { return {scale.data<float>(), growth_tracker.data<int32_t>(), overflows.data<int32_t>()}; }
  const float* flag() const { return static_cast<const float*>(found_inf.const_data()); }

  Tensor scale, growth_tracker, found_inf, overflows;
  ScalePolicy policy;

 private:
  static bool holds_int32(const Tensor& tensor, int64_t size) {
    return tensor.is_strided() && tensor.dtype() == aoti_torch_dtype_int32() && tensor.size() == size &&
           tensor.is_contiguous();
  }
};

static void update_scale_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const UpdateScaleArguments arguments(stack);
  update_scale(arguments.state(), arguments.flag(), arguments.policy);
}
MPK_CPU_KERNEL(kOp, update_scale_on_cpu)

#ifdef MPK_CUDA
static void update_scale_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const UpdateScaleArguments arguments(stack);
  const OnDeviceOf device(arguments.scale);
  require_success(update_scale_cuda(arguments.state(), arguments.flag(), arguments.policy, device.stream()), kOp);
}
MPK_CUDA_KERNEL(kOp, update_scale_on_cuda)
#endif

}  // namespace mpk
