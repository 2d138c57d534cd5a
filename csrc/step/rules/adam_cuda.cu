#include "step/rules/adam.h"
#include "step/step_cuda.h"

MPK_STEP_ON_CUDA(Adam)
