#include "common/elements.h"
#include "linear/linear_act_cuda.h"

namespace mpk {

static constexpr int kElements = 8;      // of a thread in one row: 16 bytes in 16-bit formats, 32 in fp32
static constexpr int kBlocksAtOnce = 4;  // on a multiprocessor; room for more is bought with spilled registers

// A block's threads stand in lines, `across` of them side by side, each before `count` adjacent columns; the lines take
// turns at the block's rows. It depends on the matrix's shape alone, and so does the order of sums.
struct Tiling {
  Tiling(int64_t rows, int64_t columns)
      : rows(rows), columns(columns), count(columns % kElements == 0 ? kElements : 1) {
    int side_by_side = 1;
    while (side_by_side < kMostAcross && side_by_side * count < columns) side_by_side *= 2;
    line_up(side_by_side);
    rows_of_block = kThreads / across * kLeastRowsOfLine;
    while (blocks() > kEnoughBlocks && row_blocks() > kFewPartialSums) rows_of_block *= 2;
  }
  // Narrow ones, down to the 32 bytes that memory hands out, so that few columns fill a chip, too; but no line is left
  // with less than a few rows.
  static Tiling of_one_row_of_blocks(int64_t rows, int64_t columns) {
    Tiling tiling(0, columns);
    tiling.rows = tiling.rows_of_block = rows;
    while (tiling.column_blocks < kBlocksOfSums && tiling.across * tiling.count > kElements &&
           rows >= 2 * (kThreads / tiling.across) * kLeastRowsOfLine)
      tiling.line_up(tiling.across / 2);
    return tiling;
  }
  int64_t row_blocks() const { return rows > rows_of_block ? (rows + rows_of_block - 1) / rows_of_block : 1; }
  int64_t blocks() const { return row_blocks() * column_blocks; }

  static constexpr int kMostAcross = 32, kLeastRowsOfLine = 4;
  static constexpr int kEnoughBlocks = 2048, kFewPartialSums = 128, kBlocksOfSums = 256;
  int64_t rows, columns, rows_of_block;
  int count, across;
  uint32_t column_blocks;

 private:
  void line_up(int side_by_side) {
    across = side_by_side;
    column_blocks = (columns + across * count - 1) / (across * count);
  }
};

template <int count>
struct Place {
  __device__ explicit Place(const Tiling& tiling)
      : lines(kThreads / tiling.across),
        row_block(blockIdx.x / tiling.column_blocks),
        row(row_block * tiling.rows_of_block + threadIdx.x / tiling.across),
        end(min((row_block + 1) * tiling.rows_of_block, tiling.rows)),
        first_column(int64_t{blockIdx.x % tiling.column_blocks} * tiling.across * count),
        column(first_column + threadIdx.x % tiling.across * count) {}
  int lines;
  int64_t row_block, row, end, first_column, column;
};

template <class T, int count>
__device__ Elements<T, count> read(const Strided& from, int64_t row, int64_t column) {
  const T* const first = static_cast<const T*>(from.data) + row * from.row_stride + column * from.column_stride;
  if constexpr (count > 1) {
    if (from.is_packed) return load<count>(first);
  }
  Elements<T, count> elements;
  for (int i = 0; i < count; ++i) elements.at[i] = in_global(first)[i * from.column_stride];
  return elements;
}

// z may be y.
template <class T, int count>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    bias_act_kernel(const float* z, Strided bias, T* y, T* saved, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  if (place.column >= tiling.columns) return;
  Elements<float, count> shift{};
  if (bias.data) {
    const auto of_columns = read<T, count>(bias, 0, place.column);
    for (int i = 0; i < count; ++i) shift.at[i] = widen(of_columns.at[i]);
  }
  with_activation(activation, [&](auto f) {
    for (int64_t row = place.row; row < place.end; row += place.lines) {
      const int64_t first = row * tiling.columns + place.column;
      const auto product = load<count>(z + first);
      Elements<T, count> rounded_z, rounded_y;
      for (int i = 0; i < count; ++i) {
        const float shifted = product.at[i] + shift.at[i];
        narrow(shifted, rounded_z.at[i]);
        narrow(f.forward(shifted), rounded_y.at[i]);
      }
      if (saved) store(saved + first, rounded_z);
      store(y + first, rounded_y);
    }
  });
}

// The block's sum over its rows of each column. All of its threads take part.
template <int count>
__device__ void store_column_sums(const Elements<float, count>& share, const Place<count>& place, const Tiling& tiling,
                                  const Result& sums) {
  constexpr int apart = kThreads + 32 / count;  // so that lanes meet neither writing nor reading in one of 32 banks
  __shared__ float shares[apart * count];
  for (int i = 0; i < count; ++i) shares[i * apart + threadIdx.x] = share.at[i];
  __syncthreads();
  const int columns = tiling.across * count;
  const int64_t column = place.first_column + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= columns || column >= tiling.columns) return;
  const float* own = shares + threadIdx.x % count * apart + threadIdx.x / count;
  float sum = 0;
  for (int line = 0; line < place.lines; ++line) sum += own[line * tiling.across];
  store_as<1>(sums.dtype, sums.data, place.row_block * tiling.columns + column, {sum});
}

// dz and its sums over the rows of each block, where they are wanted.
template <class D, class T, int count>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    act_backward_kernel(Strided dy, Strided saved, T* dz, Result sums, Tiling tiling, Activation activation) {
  const Place<count> place(tiling);
  Elements<float, count> sum{};
  if (place.column < tiling.columns) {
    with_activation(activation, [&](auto f) {
      for (int64_t row = place.row; row < place.end; row += place.lines) {
        const auto grad = read<D, count>(dy, row, place.column);
        Elements<T, count> known{};
        if (saved.data) known = read<T, count>(saved, row, place.column);
        Elements<T, count> rounded;
        for (int i = 0; i < count; ++i) {
          const float wide = f.backward(widen(grad.at[i]), widen(known.at[i]));
          sum.at[i] += wide;
          narrow(wide, rounded.at[i]);
        }
        if (dz) store(dz + row * tiling.columns + place.column, rounded);
      }
    });
  }
  if (sums.data) store_column_sums(sum, place, tiling, sums);
}

// Calls body with a value of the elements' type, and how many of them a thread takes at once.
template <class Body>
static cudaError_t with_elements(Dtype dtype, const Tiling& tiling, const Body& body) {
  return with_dtype(dtype, [&](auto zero) {
    if constexpr (std::is_same_v<decltype(zero), double>) {
      return cudaErrorInvalidValue;
    } else {
      return tiling.count == 1 ? body(zero, std::integral_constant<int, 1>{})
                               : body(zero, std::integral_constant<int, kElements>{});
    }
  });
}

cudaError_t bias_act_cuda(Dtype dtype, const float* z, const Strided& bias, void* y, void* saved, int64_t rows,
                          int64_t columns, Activation activation, cudaStream_t stream) {
  const Tiling tiling(rows, columns);
  return with_elements(dtype, tiling, [&](auto zero, auto count) {
    using T = decltype(zero);
    return launch(bias_act_kernel<T, count>, tiling.blocks(), stream, z, bias, static_cast<T*>(y),
                  static_cast<T*>(saved), tiling, activation);
  });
}

int64_t count_row_blocks(int64_t rows, int64_t columns) { return Tiling(rows, columns).row_blocks(); }

static cudaError_t act_backward(Dtype dtype, const Strided& dy, const Strided& saved, void* dz, const Result& sums,
                                const Tiling& tiling, Activation activation, cudaStream_t stream) {
  return with_elements(dtype, tiling, [&](auto zero, auto count) {
    using T = decltype(zero);
    const auto kernel =
        dy.dtype == Dtype::f32 ? act_backward_kernel<float, T, count> : act_backward_kernel<T, T, count>;
    return launch(kernel, tiling.blocks(), stream, dy, saved, static_cast<T*>(dz), sums, tiling, activation);
  });
}

cudaError_t act_backward_cuda(Dtype dtype, const Strided& dy, const Strided& saved, void* dz, const Result& sums,
                              int64_t rows, int64_t columns, Activation activation, cudaStream_t stream) {
  return act_backward(dtype, dy, saved, dz, sums, Tiling(rows, columns), activation, stream);
}

cudaError_t add_up_cuda(const float* rows_of_sums, const Result& sum, int64_t rows, int64_t columns,
                        cudaStream_t stream) {
  return act_backward(Dtype::f32, Strided(rows_of_sums, columns, 1, Dtype::f32), Strided(), nullptr, sum,
                      Tiling::of_one_row_of_blocks(rows, columns), Activation::none, stream);
}

}  // namespace mpk
