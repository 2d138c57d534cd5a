#include "step/rules/adam.h"
#include "step/step_cuda.h"

namespace mpk {

template cudaError_t step_cuda(const StepLaunch&, void* const*, const StepGroup<Adam>*, const StepShared&, uint32_t*,
                               Overflow*, cudaStream_t);

}  // namespace mpk
