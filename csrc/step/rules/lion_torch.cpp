#include "step/rules/lion.h"
#include "step/step_torch.h"

MPK_STEP_OPS(Lion, "lion")
