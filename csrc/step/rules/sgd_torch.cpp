#include "step/rules/sgd.h"
#include "step/step_torch.h"

MPK_STEP_OPS(Sgd, "sgd")
