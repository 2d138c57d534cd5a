#include "step/rules/lion.h"
#include "step/step_cpu.h"

MPK_STEP_ON_CPU(Lion)
