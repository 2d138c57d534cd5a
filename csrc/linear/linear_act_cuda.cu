#include "linear/linear_act_cuda.h"
#include "linear/tiling_cuda.h"

namespace mpk {

template <class T, int count>
__global__ void __launch_bounds__(kThreads, kForwardsAtOnce<T>)
    act_kernel(const T* z, T* y, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  with_activation<MathOf<T>>(activation, [&](auto f) {
    Rows<T, count, true> known(place, z, tiling.columns);
    RoundedRows<T, count> made(place, y, tiling.columns);
#pragma unroll 1
    for (int row = 0; row < place.rows; ++row) {
      Elements<float, count> values = known.read();
      for (float& value : values.at) value = f.forward(value);
      made.write(values);
    }
  });
}

// Sums of a block's columns. A thread adds up its rows in registers and, if they are many, these sums in fp64. Then
// lines are added in pairs, so that equal rows, as in a mean's gradient, lose no more than others.
template <int count>
class ColumnSums {
 public:
  __device__ explicit ColumnSums(double (&memory)[kThreads * count]) : memory_(memory) {}

  __device__ void add(const Elements<float, count>& row) {
    for (int i = 0; i < count; ++i) sum_.at[i] += row.at[i];
  }
  __device__ void flush() {
    for (int i = 0; i < count; ++i) {
      double& total = memory_[i * kThreads + threadIdx.x];
      total = (flushed_ ? total : 0) + sum_.at[i];
    }
    sum_ = {};
    flushed_ = true;
  }
  // All of the block's threads take part.
  __device__ void store(const Place<count>& place, const Tiling& tiling, const Result& sums) {
    if (flushed_) {
      for (int i = 0; i < count; ++i) sum_.at[i] = static_cast<float>(memory_[i * kThreads + threadIdx.x] + sum_.at[i]);
    }
    __syncthreads();                              // memory_ holds lines' sums from here on
    constexpr int apart = kThreads + 32 / count;  // so that lanes write and read in 32 different banks
    static_assert(apart * sizeof(float) <= kThreads * sizeof(double));
    float* const shares = reinterpret_cast<float*>(memory_);
    for (int i = 0; i < count; ++i) shares[i * apart + threadIdx.x] = sum_.at[i];
    __syncthreads();
    for (int threads = kThreads / 2; threads >= tiling.across; threads /= 2) {
      if (static_cast<int>(threadIdx.x) < threads) {
        for (int i = 0; i < count; ++i) shares[i * apart + threadIdx.x] += shares[i * apart + threadIdx.x + threads];
      }
      __syncthreads();
    }
    const int64_t column = place.first_column + threadIdx.x;
    if (static_cast<int>(threadIdx.x) >= tiling.across * count || column >= tiling.columns) return;
    const float sum = shares[threadIdx.x % count * apart + threadIdx.x / count];
    store_as<1>(sums.dtype, sums.data, place.row_block * tiling.columns + column, {sum});
  }

 private:
  double (&memory_)[kThreads * count];
  Elements<float, count> sum_{};
  bool flushed_ = false;
};

// Makes dz, its sums over the rows of each block, and y from a saved z, where they are wanted. makes_y is a template
// argument, so that a kernel without y has no instructions for it; y in fp32 takes more registers.
template <class T, int count, bool packed, bool makes_y>
__global__ void __launch_bounds__(kThreads, kIsIn16Bits<T> ? kBlocksAtOnce
                                            : makes_y      ? 2
                                                           : 3)
    act_backward_kernel(Strided dy, Strided saved, T* dz, T* y, Result sums, Tiling tiling, Activation activation) {
  __shared__ double memory[kThreads * count];
  const Place<count> place(tiling);
  ColumnSums<count> column_sums(memory);
  if (place.column < tiling.columns) {
    with_activation<MathOf<T>>(activation, [&](auto f) {
      constexpr Saves kSaves = decltype(f)::kSaves;
      Rows<T, count, packed> grads(place, dy), known(place, saved);
      RoundedRows<T, count> made(place, dz, tiling.columns), anew(place, y, tiling.columns);
      for (int row = 0; row < place.rows;) {
        const int end = min(place.rows, row + kRowsInFp32);
#pragma unroll 1
        for (; row < end; ++row) {
          Elements<float, count> grad = grads.read(), from{};
          if constexpr (kSaves != Saves::nothing) from = known.read();
          for (int i = 0; i < count; ++i) grad.at[i] = f.backward(grad.at[i], from.at[i]);
          column_sums.add(grad);
          if (dz) made.write(grad);
          if constexpr (makes_y && kSaves == Saves::z) {
            for (float& value : from.at) value = f.forward(value);
            anew.write(from);
          }
        }
        if (row < place.rows) column_sums.flush();
      }
    });
  }
  if (sums.data) column_sums.store(place, tiling, sums);
}

cudaError_t act_cuda(Dtype dtype, const void* z, void* y, int64_t rows, int64_t columns, Activation activation,
                     cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  return with_elements(dtype, tiling, true, [&](auto zero, auto count, auto) {
    using T = decltype(zero);
    return launch(act_kernel<T, count>, tiling.blocks(), stream, static_cast<const T*>(z), static_cast<T*>(y), tiling,
                  activation);
  });
}

int64_t count_row_blocks(int64_t rows, int64_t columns) { return Tiling(rows, columns).row_blocks(); }

static cudaError_t act_backward(Dtype dtype, const Strided& dy, const Strided& saved, void* dz, void* y,
                                const Result& sums, const Tiling& tiling, Activation activation, cudaStream_t stream) {
  const bool packed = dy.is_packed && (saved.is_packed || !saved.data);
  return with_elements(dtype, tiling, packed, [&](auto zero, auto count, auto packed) {
    using T = decltype(zero);
    const auto kernel = y ? act_backward_kernel<T, count, packed, true> : act_backward_kernel<T, count, packed, false>;
    return launch(kernel, tiling.blocks(), stream, dy, saved, static_cast<T*>(dz), static_cast<T*>(y), sums, tiling,
                  activation);
  });
}

cudaError_t act_backward_cuda(Dtype dtype, const Strided& dy, const Strided& saved, void* dz, void* y,
                              const Result& sums, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream) {
  return act_backward(dtype, dy, saved, dz, y, sums, Tiling(rows, columns), activation, stream);
}

cudaError_t add_up_cuda(const float* rows_of_sums, const Result& sum, int64_t rows, int64_t columns,
                        cudaStream_t stream) {
  return act_backward(Dtype::f32, Strided(rows_of_sums, columns, 1, Dtype::f32), Strided(), nullptr, nullptr, sum,
                      Tiling::of_one_row_of_blocks(rows, columns), Activation::none, stream);
}

}  // namespace mpk
