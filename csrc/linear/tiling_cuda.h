// How the threads of the CUDA passes share a matrix.
#pragma once

#include "common/elements.h"
#include "linear/linear_act_cuda.h"

namespace mpk {

inline constexpr int kElements = 8;     // per thread and row: 16 bytes in 16-bit formats, 32 in fp32
inline constexpr int kRowsInFp32 = 16;  // rows that are added one by one in fp32; 8 equal rows lose an eps

// How many threads a multiprocessor holds, on the smallest of the chips that this code runs on.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1000)
inline constexpr int kThreadsAtOnce = 2048;
#else
inline constexpr int kThreadsAtOnce = __CUDA_ARCH__ < 800 ? 1024 : 1536;
#endif

template <class T>
inline constexpr bool kIsIn16Bits = sizeof(T) == 2;
template <class T>
using MathOf = std::conditional_t<kIsIn16Bits<T>, HalfMath, Fp32Math>;

// How many blocks a multiprocessor runs at once. More would spill registers.
inline constexpr int kBlocksAtOnce = 4;
template <class T>
inline constexpr int kForwardsAtOnce = kIsIn16Bits<T> ? kThreadsAtOnce / kThreads : kBlocksAtOnce;

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
        rows(static_cast<int>((min((row_block + 1) * tiling.rows_of_block, tiling.rows) - row + lines - 1) / lines)),
        first_column(int64_t{blockIdx.x % tiling.column_blocks} * tiling.across * count),
        column(first_column + threadIdx.x % tiling.across * count) {}
  int lines;
  int64_t row_block, row;
  int rows;  // that the thread takes, from `row` on, `lines` apart
  int64_t first_column, column;
};

// Reads a thread's elements of one of its rows after the other. Addresses are added up, because products take longer.
template <class T, int count, bool packed>
class Rows {
 public:
  __device__ Rows(const Place<count>& place, const Strided& from)
      : Rows(place, static_cast<const T*>(from.data), from.row_stride, from.column_stride) {}
  __device__ Rows(const Place<count>& place, const T* from, int64_t row_stride, int64_t column_stride = 1)
      : next_(from + place.row * row_stride + place.column * column_stride),
        column_stride_(column_stride),
        apart_(place.lines * row_stride) {}
  __device__ Elements<float, count> read() {
    Elements<T, count> elements;
    if constexpr (packed) {
      elements = load<count>(next_);
    } else {
      for (int i = 0; i < count; ++i) elements.at[i] = in_global(next_)[i * column_stride_];
    }
    next_ += apart_;
    return widened(elements);
  }

 private:
  const T* next_;
  int64_t column_stride_, apart_;
};

// Rounds a thread's elements of one of its rows after the other, and stores them.
template <class T, int count>
class RoundedRows {
 public:
  __device__ RoundedRows(const Place<count>& place, T* to, int64_t row_stride)
      : next_(to + place.row * row_stride + place.column), apart_(place.lines * row_stride) {}
  __device__ void write(const Elements<float, count>& wide) {
    Elements<T, count> rounded;
    for (int i = 0; i < count; ++i) narrow(wide.at[i], rounded.at[i]);
    store(next_, rounded);
    next_ += apart_;
  }

 private:
  T* next_;
  int64_t apart_;
};

// Calls body with a value of the elements' type, how many of them a thread takes at once, and whether it reads so many
// by one access.
template <class Body>
cudaError_t with_elements(Dtype dtype, const Tiling& tiling, bool packed, const Body& body) {
  return with_dtype(dtype, [&](auto zero) {
    if constexpr (std::is_same_v<decltype(zero), double>) {
      return cudaErrorInvalidValue;
    } else {
      const std::integral_constant<int, kElements> many;
      return tiling.count == 1 ? body(zero, std::integral_constant<int, 1>{}, std::false_type{})
             : packed          ? body(zero, many, std::true_type{})
                               : body(zero, many, std::false_type{});
    }
  });
}

}  // namespace mpk
