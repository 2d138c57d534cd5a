// linear_act's passes over z and over dz, between the matrix products.
#pragma once

#include "common/cpu.h"
#include "common/table.h"
#include "linear/activation.h"

namespace mpk {

// Matrices are contiguous. 16-bit results are rounded once.
//
// Computes y from z + bias, and saves z + bias. z is fp32 or of dtype; y and saved are of dtype, and may share z's
// memory.
struct Forward {
  Activation activation;
  Dtype z_dtype, dtype;
  const void* z;
  const void* bias;  // of dtype, or null
  void* y;
  void* saved;  // or null
};

// Computes dz, in fp32, in dtype or both, the sums of its columns, and y once more from a saved z. dy is fp32 or of
// dtype; saved and y are of dtype. dz and narrow_dz may share dy's memory.
struct Backward {
  Activation activation;
  Dtype dy_dtype, dtype;
  const void* dy;
  const void* saved;  // not read if the activation saves nothing
  float* dz;          // or null
  void* narrow_dz;    // or null
  void* y;            // or null
  float* sums;        // or null; one per column, over these rows alone
};

MPK_FOR_EACH_ISA(void linear_act_rows(const Forward& pass, int64_t rows, int64_t columns))
MPK_FOR_EACH_ISA(void linear_act_backward_rows(const Backward& pass, int64_t rows, int64_t columns))
MPK_FOR_EACH_ISA(void widen_span(Dtype dtype, const void* from, float* to, int64_t size))
MPK_FOR_EACH_ISA(void narrow_span(Dtype dtype, const float* from, void* to, int64_t size))
// to = high + low; where high has overflowed, low is left out.
MPK_FOR_EACH_ISA(void add_span(Dtype dtype, const void* high, const void* low, float* to, int64_t size))

}  // namespace mpk
