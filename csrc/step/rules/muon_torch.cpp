#include "step/rules/muon.h"
#include "step/step_torch.h"

MPK_STEP_OPS(Muon, "muon")
