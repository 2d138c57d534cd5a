#include "step/rules/adam.h"
#include "step/step_cpu.h"

MPK_STEP_ON_CPU(Adam)
