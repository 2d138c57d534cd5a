#include "step/rules/adamw.h"
#include "step/step_cuda.h"

MPK_STEP_ON_CUDA(Adamw)
