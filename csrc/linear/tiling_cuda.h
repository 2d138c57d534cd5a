// How the threads of the CUDA passes share a matrix.
#pragma once

#include "common/elements.h"
#include "linear/linear_act_cuda.h"

namespace mpk {

inline constexpr int kElements = 8;      // per thread and row: 16 bytes in 16-bit formats, 32 in fp32
inline constexpr int kBlocksAtOnce = 4;  // on a multiprocessor; more blocks would spill registers
inline constexpr int kRowsInFp32 = 16;   // rows that are added one by one in fp32; 8 equal rows lose an eps

// A block's threads form lines of `across` threads, each of which takes `count` adjacent columns; the lines take turns
// at the block's rows. The tiling depends on the matrix's shape alone, and so does the order of sums.
struct Tiling {
  Tiling(int64_t rows, int64_t columns)
      : rows(rows), columns(columns), count(columns % kElements == 0 ? kElements : 1) {
    int side_by_side = 1;
    while (side_by_side < kMostAcross && side_by_side * count < columns) side_by_side *= 2;
    line_up(side_by_side);
    rows_of_block = kThreads / across * kLeastRowsOfLine;
    while (blocks() > kEnoughBlocks && row_blocks() > kFewPartialSums) rows_of_block *= 2;
  }
  // Makes blocks narrow, down to the 32 bytes that memory hands out, so that even few columns fill a chip. Each line
  // keeps kLeastRowsOfLine rows at least.
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

// One of the matrices that read_all reads, and where its elements go.
template <class T, int count>
struct Reading {
  const Strided& from;
  Elements<T, count>& to;
};

// Reads the same place of all matrices. Packed ones are all loaded behind one branch: a load after a branch of its own
// would wait for the load before it.
template <int count, class... T>
__device__ void read_all(int64_t row, int64_t column, const Reading<T, count>&... each) {
  if constexpr (count > 1) {
    if ((each.from.is_packed && ...)) {
      ((each.to = load<count>(static_cast<const T*>(each.from.data) + row * each.from.row_stride + column)), ...);
      return;
    }
  }
  ((each.to = read<T, count>(each.from, row, column)), ...);
}

// Calls body with a value of the elements' type, and how many of them a thread takes at once.
template <class Body>
cudaError_t with_elements(Dtype dtype, const Tiling& tiling, const Body& body) {
  return with_dtype(dtype, [&](auto zero) {
    if constexpr (std::is_same_v<decltype(zero), double>) {
      return cudaErrorInvalidValue;
    } else {
      return tiling.count == 1 ? body(zero, std::integral_constant<int, 1>{})
                               : body(zero, std::integral_constant<int, kElements>{});
    }
  });
}

}  // namespace mpk
