#include "linear/linear_act.h"
#include "linear/vectors_cpu.h"

namespace mpk::MPK_ISA {

template <class A, class Z, class T>
static void forward_rows(const Forward& pass, int64_t rows, int64_t columns) {
  const T* const bias = static_cast<const T*>(pass.bias);
  for (int64_t row = 0; row < rows; ++row) {
    const Z* const z = static_cast<const Z*>(pass.z) + row * columns;
    T* const y = static_cast<T*>(pass.y) + row * columns;
    T* const saved = pass.saved ? static_cast<T*>(pass.saved) + row * columns : nullptr;
    for_each_vector(columns, [&](int64_t i, auto count) {
      Floats x = load_some(z + i, count);
      if (bias) x += load_some(bias + i, count);
      if (saved) store_some(saved + i, x, count);
      store_some(y + i, A::forward(x), count);
    });
  }
}

template <class A, class D, class T>
static void backward_rows(const Backward& pass, int64_t rows, int64_t columns) {
  if (pass.sums) memset(pass.sums, 0, columns * sizeof(float));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row * columns;
    const D* const dy = static_cast<const D*>(pass.dy) + first;
    for_each_vector(columns, [&](int64_t i, auto count) {
      Floats dz = load_some(dy + i, count);
      if constexpr (A::kSaves != Saves::nothing) {
        const Floats saved = load_some(static_cast<const T*>(pass.saved) + first + i, count);
        dz = A::backward(dz, saved);
        if constexpr (A::kSaves == Saves::z) {
          if (pass.y) store_some(static_cast<T*>(pass.y) + first + i, A::forward(saved), count);
        }
      }
      if (pass.dz) store_some(pass.dz + first + i, dz, count);
      if (pass.narrow_dz) store_some(static_cast<T*>(pass.narrow_dz) + first + i, dz, count);
      if (pass.sums) store_some(pass.sums + i, load_some(pass.sums + i, count) + dz, count);
    });
  }
}

void linear_act_rows(const Forward& pass, int64_t rows, int64_t columns) {
  with_types(pass.activation, pass.dtype, pass.z_dtype, [&](auto f, auto zero, auto read) {
    forward_rows<decltype(f), decltype(read), decltype(zero)>(pass, rows, columns);
  });
}

void linear_act_backward_rows(const Backward& pass, int64_t rows, int64_t columns) {
  with_types(pass.activation, pass.dtype, pass.dy_dtype, [&](auto f, auto zero, auto read) {
    backward_rows<decltype(f), decltype(read), decltype(zero)>(pass, rows, columns);
  });
}

void widen_span(Dtype dtype, const void* from, float* to, int64_t size) {
  with_float_or_half(dtype, [&](auto zero) {
    const auto* const elements = static_cast<const decltype(zero)*>(from);
    for_each_vector(size, [&](int64_t i, auto count) { store_some(to + i, load_some(elements + i, count), count); });
  });
}

void narrow_span(Dtype dtype, const float* from, void* to, int64_t size) {
  with_float_or_half(dtype, [&](auto zero) {
    auto* const elements = static_cast<decltype(zero)*>(to);
    for_each_vector(size, [&](int64_t i, auto count) { store_some(elements + i, load_some(from + i, count), count); });
  });
}

void add_span(Dtype dtype, const void* high, const void* low, float* to, int64_t size) {
  with_float_or_half(dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each_vector(size, [&](int64_t i, auto count) {
      const Floats large = load_some(static_cast<const T*>(high) + i, count);
      const Floats sum = large + load_some(static_cast<const T*>(low) + i, count);
      store_some(to + i, is_non_finite<float>(large) ? large : sum, count);
    });
  });
}

}  // namespace mpk::MPK_ISA
