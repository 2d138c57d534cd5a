#include "step/rules/adamw.h"
#include "step/step_torch.h"

MPK_STEP_OPS(Adamw, "adamw")
