// Vectors along the rows of the linear ops' matrices, and their types.
#pragma once

#include "common/simd.h"
#include "common/table.h"
#include "linear/activation.h"

namespace mpk::MPK_ISA {

// Load and store up to kLanes elements. A whole vector goes directly, the rest of a row through a copy.
template <class T>
MPK_FN Floats load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T some[kLanes]{};
  memcpy(some, from, count * sizeof(T));
  return load(some);
}
template <class T>
MPK_FN void store_some(T* to, Floats x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  T some[kLanes];
  store(some, x);
  memcpy(to, some, count * sizeof(T));
}

template <class Body>
MPK_FN void for_each_vector(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, std::integral_constant<int64_t, kLanes>{});
  if (i < size) body(i, size - i);
}

// Calls body with a value of dtype's type. fp64, which only the reference computes, is left out.
template <class Body>
void with_float_or_half(Dtype dtype, const Body& body) {
  with_dtype(dtype, [&](auto zero) {
    if constexpr (!std::is_same_v<decltype(zero), double>) body(zero);
  });
}

// Calls body with values of the activation's type, of dtype's, and of the type that is read: float or dtype's.
template <class Body>
void with_types(Activation activation, Dtype dtype, Dtype read, const Body& body) {
  with_activation(activation, [&](auto f) {
    with_float_or_half(dtype, [&](auto zero) { read == Dtype::f32 ? body(f, zero, 0.0f) : body(f, zero, zero); });
  });
}

}  // namespace mpk::MPK_ISA
