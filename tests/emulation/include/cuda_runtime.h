// The CUDA runtime on the CPU, for tests: it shadows the toolkit's header, and g++ compiles the .cu files as they are.
//
// Not here: waiting for another block or spinning on memory (blocks run one after the other, so that would hang), weak
// memory order (a missing __threadfence goes unseen), extern __shared__ (emulation::dynamic_shared() instead), inline
// PTX, launch attributes, and the limits that nvcc and ptxas check themselves (launch bounds, static shared memory).
// g++ wants alignas before __shared__.
#pragma once

#include "emulation/device.h"
#include "emulation/host.h"
#include "emulation/language.h"
#include "emulation/scheduler.h"
