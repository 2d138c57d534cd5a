// A list of tensors as kernels see it: rows of flat memory, cut into chunks that threads or blocks take one at a time.
#pragma once

#include "common/numeric.h"

namespace mpk {

MPK_FN int64_t width_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

struct Row {
  void* data;
  int64_t size;         // in elements
  int32_t first_chunk;  // counted over the whole table; every row has at least one chunk, an empty row an empty one
  Dtype dtype;

  MPK_FN void* at(int64_t element) const { return static_cast<char*>(data) + element * width_of(dtype); }
};

MPK_FN int64_t bytes_read(const Row& row) { return row.size * width_of(row.dtype); }

// An op that needs more than one tensor at a time has a row of its own, with a size, a first_chunk and bytes_read.
template <class Row>
struct TableOf {
  const Row* rows;
  int32_t count;
  int32_t chunks;
  int64_t chunk_size;
};
using Table = TableOf<Row>;

// A CUDA kernel finds so many rows in its launch's parameters; further ones need memory of their own (rows.h).
template <class Row>
inline constexpr int kRowsInParameters = 32512 / sizeof(Row);

// Adjacent rows of a table that stays on the device from step to step, as many as one launch takes. Where their tensors
// lie comes with the launch (rows.h).
struct Stretch {
  static constexpr int kMostRows = 3500;  // 28,000 bytes of the launch's 32,764

  const Row* table;             // all of it, without `data`
  const int32_t* row_of_chunk;  // found without a search, whose ten reads would wait for each other
  int64_t chunk_size;
  int32_t count;  // of all the table's rows
  int32_t first_row, end_row, first_chunk, end_chunk;

  MPK_FN int32_t rows() const { return end_row - first_row; }
  MPK_FN int32_t chunks() const { return end_chunk - first_chunk; }
};

// What one chunk covers: elements [begin, begin + size) of a row.
struct Span {
  int32_t chunk;
  int32_t row;
  int64_t begin;
  int64_t size;
};

MPK_FN int32_t chunks_of(int64_t size, int64_t chunk_size) {
  return size > 0 ? static_cast<int32_t>((size + chunk_size - 1) / chunk_size) : 1;
}

template <class Row>
MPK_FN Span span_at(const Row* rows, int32_t chunk, int32_t row, int64_t chunk_size) {
  const int64_t begin = (chunk - rows[row].first_chunk) * chunk_size;
  const int64_t left = rows[row].size - begin;
  return {chunk, row, begin, left < chunk_size ? left : chunk_size};
}

// The row that holds chunk is the last one whose first chunk is not beyond it.
template <class Row>
MPK_FN Span find_span(const Row* rows, int32_t count, int32_t chunk, int64_t chunk_size) {
  int32_t low = 0;
  for (int32_t high = count; high - low > 1;) {
    const int32_t middle = low + (high - low) / 2;
    (rows[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return span_at(rows, chunk, low, chunk_size);
}

// The span after this one; beyond the table's last one, a span that must not be used.
template <class Row>
inline Span next_span(const TableOf<Row>& table, const Span& span) {
  const bool same_row = span.row + 1 == table.count || table.rows[span.row + 1].first_chunk > span.chunk + 1;
  return span_at(table.rows, span.chunk + 1, same_row ? span.row : span.row + 1, table.chunk_size);
}

}  // namespace mpk
