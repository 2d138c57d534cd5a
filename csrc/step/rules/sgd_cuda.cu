#include "step/rules/sgd.h"
#include "step/step_cuda.h"

MPK_STEP_ON_CUDA(Sgd)
