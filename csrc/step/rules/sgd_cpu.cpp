#include "step/rules/sgd.h"
#include "step/step_cpu.h"

MPK_STEP_ON_CPU(Sgd)
