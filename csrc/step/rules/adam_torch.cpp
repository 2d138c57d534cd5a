#include "step/rules/adam.h"
#include "step/step_torch.h"

MPK_STEP_OPS(Adam, "adam")
