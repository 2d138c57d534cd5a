#include "step/rules/muon.h"
#include "step/step_cuda.h"

MPK_STEP_ON_CUDA(Muon)
