#include "linear/linear_gated.h"
#include "linear/linear_gated_cuda.h"
#include "linear/rows_cuda.h"

namespace mpk {

template <class T, int count>
__device__ Elements<float, count> widened(const Elements<T, count>& from) {
  Elements<float, count> wide;
  for (int i = 0; i < count; ++i) wide.at[i] = widen(from.at[i]);
  return wide;
}

template <class T, int count>
__device__ Elements<float, count> bias_at(const Strided& bias, int64_t column) {
  if (!bias.data) return {};
  return widened(read<T, count>(bias, 0, column));
}

static constexpr int kForwardBlocksAtOnce = 3;  // kBlocksAtOnce leaves too few registers for both biases

// z may be saved.
template <class T, int count>
__global__ void __launch_bounds__(kThreads, kForwardBlocksAtOnce)
    linear_gated_kernel(const float* z, Strided gate_bias, Strided up_bias, T* h, T* saved, Tiling tiling,
                        Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  const auto gate_shift = bias_at<T, count>(gate_bias, place.column),
             up_shift = bias_at<T, count>(up_bias, place.column);
  with_activation(activation, [&](auto f) {
    for (int64_t row = place.row; row < place.end; row += place.lines) {
      const int64_t first = 2 * row * tiling.columns + place.column;
      const auto gate = load<count>(z + first), up = load<count>(z + first + tiling.columns);
      Elements<T, count> rounded_gate, rounded_up, rounded_h;
      for (int i = 0; i < count; ++i) {
        const float of_gate = gate.at[i] + gate_shift.at[i], of_up = up.at[i] + up_shift.at[i];
        narrow(of_gate, rounded_gate.at[i]);
        narrow(of_up, rounded_up.at[i]);
        narrow(Gated<decltype(f)>::forward(of_gate, of_up), rounded_h.at[i]);
      }
      if (saved) {
        store(saved + first, rounded_gate);
        store(saved + first + tiling.columns, rounded_up);
      }
      store(h + row * tiling.columns + place.column, rounded_h);
    }
  });
}

template <class D, class T, int count>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    linear_dgated_kernel(Strided dh, Strided gate, Strided up, T* dz, T* h, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  with_activation(activation, [&](auto f) {
    for (int64_t row = place.row; row < place.end; row += place.lines) {
      Elements<D, count> grad;
      Elements<T, count> known_gate, known_up;
      read_all<count>(row, place.column, Reading<D, count>{dh, grad}, Reading<T, count>{gate, known_gate},
                      Reading<T, count>{up, known_up});
      Elements<T, count> dgate, dup, again;
      for (int i = 0; i < count; ++i) {
        const auto of = Gated<decltype(f)>::backward(widen(grad.at[i]), widen(known_gate.at[i]), widen(known_up.at[i]));
        narrow(of.gate, dgate.at[i]);
        narrow(of.up, dup.at[i]);
        narrow(of.h, again.at[i]);
      }
      const int64_t first = 2 * row * tiling.columns + place.column;
      store(dz + first, dgate);
      store(dz + first + tiling.columns, dup);
      if (h) store(h + row * tiling.columns + place.column, again);
    }
  });
}

cudaError_t linear_gated_cuda(Dtype dtype, const float* z, const Strided& gate_bias, const Strided& up_bias, void* h,
                              void* saved, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  return with_elements(dtype, tiling, [&](auto zero, auto count) {
    using T = decltype(zero);
    return launch(linear_gated_kernel<T, count>, tiling.blocks(), stream, z, gate_bias, up_bias, static_cast<T*>(h),
                  static_cast<T*>(saved), tiling, activation);
  });
}

cudaError_t linear_dgated_cuda(Dtype dtype, const Strided& dh, const Strided& gate, const Strided& up, void* dz,
                               void* h, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  return with_elements(dtype, tiling, [&](auto zero, auto count) {
    using T = decltype(zero);
    const auto kernel =
        dh.dtype == Dtype::f32 ? linear_dgated_kernel<float, T, count> : linear_dgated_kernel<T, T, count>;
    return launch(kernel, tiling.blocks(), stream, dh, gate, up, static_cast<T*>(dz), static_cast<T*>(h), tiling,
                  activation);
  });
}

}  // namespace mpk
