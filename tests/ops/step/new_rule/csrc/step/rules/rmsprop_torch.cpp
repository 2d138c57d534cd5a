#include "step/rules/rmsprop.h"
#include "step/step_torch.h"

MPK_STEP_OPS(Rmsprop, "rmsprop")
