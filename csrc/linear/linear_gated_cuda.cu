#include "linear/linear_gated.h"
#include "linear/linear_gated_cuda.h"
#include "linear/tiling_cuda.h"

namespace mpk {

template <class T, int count>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    linear_gated_kernel(const T* z, T* h, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  with_activation(activation, [&](auto f) {
    for (int64_t row = place.row; row < place.end; row += place.lines) {
      const int64_t first = 2 * row * tiling.columns + place.column;
      const auto gate = load<count>(z + first), up = load<count>(z + first + tiling.columns);
      Elements<T, count> rounded;
      for (int i = 0; i < count; ++i)
        narrow(Gated<decltype(f)>::forward(widen(gate.at[i]), widen(up.at[i])), rounded.at[i]);
      store(h + row * tiling.columns + place.column, rounded);
    }
  });
}

template <class T, int count>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    linear_dgated_kernel(Strided dh, Strided gate, Strided up, T* dz, T* h, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  with_activation(activation, [&](auto f) {
    for (int64_t row = place.row; row < place.end; row += place.lines) {
      Elements<T, count> grad, known_gate, known_up;
      read_all<count>(row, place.column, Reading<T, count>{dh, grad}, Reading<T, count>{gate, known_gate},
                      Reading<T, count>{up, known_up});
      Elements<T, count> dgate, dup, again;
      for (int i = 0; i < count; ++i) {
        const auto gradients =
            Gated<decltype(f)>::backward(widen(grad.at[i]), widen(known_gate.at[i]), widen(known_up.at[i]));
        narrow(gradients.gate, dgate.at[i]);
        narrow(gradients.up, dup.at[i]);
        narrow(gradients.h, again.at[i]);
      }
      const int64_t first = 2 * row * tiling.columns + place.column;
      store(dz + first, dgate);
      store(dz + first + tiling.columns, dup);
      if (h) store(h + row * tiling.columns + place.column, again);
    }
  });
}

cudaError_t linear_gated_cuda(Dtype dtype, const void* z, void* h, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  return with_elements(dtype, tiling, [&](auto zero, auto count) {
    using T = decltype(zero);
    return launch(linear_gated_kernel<T, count>, tiling.blocks(), stream, static_cast<const T*>(z), static_cast<T*>(h),
                  tiling, activation);
  });
}

cudaError_t linear_dgated_cuda(Dtype dtype, const Strided& dh, const Strided& gate, const Strided& up, void* dz,
                               void* h, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  return with_elements(dtype, tiling, [&](auto zero, auto count) {
    using T = decltype(zero);
    return launch(linear_dgated_kernel<T, count>, tiling.blocks(), stream, dh, gate, up, static_cast<T*>(dz),
                  static_cast<T*>(h), tiling, activation);
  });
}

}  // namespace mpk
