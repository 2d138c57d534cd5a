// linear_gated and linear_dgated: the formula, and the passes over z and over dh, beside the matrix products.
#pragma once

#include "common/cpu.h"
#include "common/table.h"
#include "linear/activation.h"

namespace mpk {

template <class F>
struct GatedGradients {
  F gate, up, h;
};

// h = f(gate) up
template <class A>
struct Gated {
  template <class F>
  static MPK_FN F forward(F gate, F up) {
    return A::forward(gate) * up;
  }
  // Returns the gradients of gate and up, and h.
  template <class F>
  static MPK_FN GatedGradients<F> backward(F dh, F gate, F up) {
    const F opened = A::forward(gate);
    return {A::backward(dh * up, A::kSaves == Saves::y ? opened : gate), dh * opened, opened * up};
  }
};

// Matrices are contiguous; a row of z holds a row of gate, then one of up. 16-bit results are rounded once.
//
// Computes h from z + bias, and saves z + bias. z is fp32 or of dtype; all else is of dtype. saved may share z's
// memory.
struct GatedForward {
  Activation activation;
  Dtype z_dtype, dtype;
  const void* z;
  const void *gate_bias, *up_bias;  // or null
  void* h;
  void* saved;  // or null
};

// Computes dz from dh and z, and h once more. dh is fp32 or of dtype; all else is of dtype.
struct GatedBackward {
  Activation activation;
  Dtype dh_dtype, dtype;
  const void* dh;
  const void* z;
  void* dz;
  void* h;  // or null
};

MPK_FOR_EACH_ISA(void linear_gated_rows(const GatedForward& pass, int64_t rows, int64_t columns))
MPK_FOR_EACH_ISA(void linear_dgated_rows(const GatedBackward& pass, int64_t rows, int64_t columns))

}  // namespace mpk
