#include "step/rules/rmsprop.h"
#include "step/step_cuda.h"

MPK_STEP_ON_CUDA(Rmsprop)
