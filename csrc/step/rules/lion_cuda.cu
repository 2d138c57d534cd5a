#include "step/rules/lion.h"
#include "step/step_cuda.h"

MPK_STEP_ON_CUDA(Lion)
