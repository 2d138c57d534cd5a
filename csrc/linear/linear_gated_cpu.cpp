#include "linear/linear_gated.h"
#include "linear/vectors_cpu.h"

namespace mpk::MPK_ISA {

template <class A, class Z, class T>
static void forward_rows(const GatedForward& pass, int64_t rows, int64_t columns) {
  const T *const gate_bias = static_cast<const T*>(pass.gate_bias), *const up_bias =
                                                                        static_cast<const T*>(pass.up_bias);
  for (int64_t row = 0; row < rows; ++row) {
    const Z* const z = static_cast<const Z*>(pass.z) + row * 2 * columns;
    T* const saved = pass.saved ? static_cast<T*>(pass.saved) + row * 2 * columns : nullptr;
    T* const h = static_cast<T*>(pass.h) + row * columns;
    for_each_vector(columns, [&](int64_t i, auto count) {
      Floats gate = load_some(z + i, count), up = load_some(z + columns + i, count);
      if (gate_bias) gate += load_some(gate_bias + i, count);
      if (up_bias) up += load_some(up_bias + i, count);
      if (saved) {
        store_some(saved + i, gate, count);
        store_some(saved + columns + i, up, count);
      }
      store_some(h + i, Gated<A>::forward(gate, up), count);
    });
  }
}

template <class A, class D, class T>
static void backward_rows(const GatedBackward& pass, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    const D* const dh = static_cast<const D*>(pass.dh) + row * columns;
    const T* const z = static_cast<const T*>(pass.z) + row * 2 * columns;
    T* const dz = static_cast<T*>(pass.dz) + row * 2 * columns;
    T* const h = pass.h ? static_cast<T*>(pass.h) + row * columns : nullptr;
    for_each_vector(columns, [&](int64_t i, auto count) {
      const auto gradients =
          Gated<A>::backward(load_some(dh + i, count), load_some(z + i, count), load_some(z + columns + i, count));
      store_some(dz + i, gradients.gate, count);
      store_some(dz + columns + i, gradients.up, count);
      if (h) store_some(h + i, gradients.h, count);
    });
  }
}

void linear_gated_rows(const GatedForward& pass, int64_t rows, int64_t columns) {
  with_types(pass.activation, pass.dtype, pass.z_dtype, [&](auto f, auto zero, auto read) {
    forward_rows<decltype(f), decltype(read), decltype(zero)>(pass, rows, columns);
  });
}

void linear_dgated_rows(const GatedBackward& pass, int64_t rows, int64_t columns) {
  with_types(pass.activation, pass.dtype, pass.dh_dtype, [&](auto f, auto zero, auto read) {
    backward_rows<decltype(f), decltype(read), decltype(zero)>(pass, rows, columns);
  });
}

}  // namespace mpk::MPK_ISA
