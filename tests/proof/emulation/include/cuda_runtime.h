// The CUDA runtime on the CPU, for tests: it shadows the toolkit's header, and g++ compiles the .cu files as they are.
//
// A store is visible at once. But a kernel that relies on it without a barrier, or a fence and an atomic, has a race,
// and fails.
//
// Not emulated: waiting for another block or spinning on memory (a few blocks run at a time, so that would hang), order
// that shuffles or plain flags make, shared memory that a launch asks for, inline PTX, launch attributes, and the
// limits that nvcc and ptxas check themselves (launch bounds, static shared memory). g++ wants alignas before
// __shared__.
#pragma once

#include "emulation/device.h"
#include "emulation/host.h"
#include "emulation/language.h"
#include "emulation/scheduler.h"
