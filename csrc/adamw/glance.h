// What a glance at Python's objects tells of a parameter and its grad (glance_python.cpp), for kernels to go by.
#pragma once

#include "common/numeric.h"

namespace mpk {

// Both of one shape, on one device, and with their elements in the order of indices.
struct Seen {
  void* param;
  const void* grad;
  int64_t size;
  Dtype param_dtype, grad_dtype;
};
static_assert(sizeof(Seen) == 4 * sizeof(int64_t));  // as mpkernels/_glance.py has it

}  // namespace mpk
