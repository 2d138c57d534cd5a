#include "step/rules/rmsprop.h"
#include "step/step_cpu.h"

MPK_STEP_ON_CPU(Rmsprop)
