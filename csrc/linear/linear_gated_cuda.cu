#include "linear/linear_gated.h"
#include "linear/linear_gated_cuda.h"
#include "linear/tiling_cuda.h"

namespace mpk {

template <class T, int count>
__global__ void __launch_bounds__(kThreads, kForwardsAtOnce<T>)
    linear_gated_kernel(const T* z, T* h, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  with_activation<MathOf<T>>(activation, [&](auto f) {
    const int64_t columns = tiling.columns;
    Rows<T, count, true> gates(place, z, 2 * columns), ups(place, z + columns, 2 * columns);
    RoundedRows<T, count> made(place, h, columns);
#pragma unroll 1
    for (int row = 0; row < place.rows; ++row) {
      Elements<float, count> gate = gates.read();
      const Elements<float, count> up = ups.read();
      for (int i = 0; i < count; ++i) gate.at[i] = Gated<decltype(f)>::forward(gate.at[i], up.at[i]);
      made.write(gate);
    }
  });
}

template <class T, int count, bool packed>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    linear_dgated_kernel(Strided dh, Strided gate, Strided up, T* dz, T* h, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  with_activation<MathOf<T>>(activation, [&](auto f) {
    const int64_t columns = tiling.columns;
    Rows<T, count, packed> grads(place, dh), gates(place, gate), ups(place, up);
    RoundedRows<T, count> dgate(place, dz, 2 * columns), dup(place, dz + columns, 2 * columns), anew(place, h, columns);
#pragma unroll 1
    for (int row = 0; row < place.rows; ++row) {
      Elements<float, count> grad = grads.read(), of_gate = gates.read(), of_up = ups.read();
      for (int i = 0; i < count; ++i) {
        const auto made = Gated<decltype(f)>::backward(grad.at[i], of_gate.at[i], of_up.at[i]);
        grad.at[i] = made.h, of_gate.at[i] = made.gate, of_up.at[i] = made.up;
      }
      dgate.write(of_gate);
      dup.write(of_up);
      if (h) anew.write(grad);
    }
  });
}

cudaError_t linear_gated_cuda(Dtype dtype, const void* z, void* h, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  return with_elements(dtype, tiling, true, [&](auto zero, auto count, auto) {
    using T = decltype(zero);
    return launch(linear_gated_kernel<T, count>, tiling.blocks(), stream, static_cast<const T*>(z), static_cast<T*>(h),
                  tiling, activation);
  });
}

cudaError_t linear_dgated_cuda(Dtype dtype, const Strided& dh, const Strided& gate, const Strided& up, void* dz,
                               void* h, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  const bool packed = dh.is_packed && gate.is_packed && up.is_packed;
  return with_elements(dtype, tiling, packed, [&](auto zero, auto count, auto packed) {
    using T = decltype(zero);
    return launch(linear_dgated_kernel<T, count, packed>, tiling.blocks(), stream, dh, gate, up, static_cast<T*>(dz),
                  static_cast<T*>(h), tiling, activation);
  });
}

}  // namespace mpk
