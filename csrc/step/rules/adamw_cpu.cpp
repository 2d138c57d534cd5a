#include "step/rules/adamw.h"
#include "step/step_cpu.h"

MPK_STEP_ON_CPU(Adamw)
