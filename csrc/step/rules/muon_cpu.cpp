#include "step/rules/muon.h"
#include "step/step_cpu.h"

MPK_STEP_ON_CPU(Muon)
