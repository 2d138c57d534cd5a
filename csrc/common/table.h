// A list of tensors as kernels see it: rows of flat memory, cut into chunks that threads or blocks take one at a time.
#pragma once

#include "common/numeric.h"

namespace mpk {

MPK_FN int64_t width_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

struct Row {
  void* data;
  int64_t size;         // in elements
  int32_t first_chunk;  // counted over the whole table; even an empty row has a chunk
  Dtype dtype;

  MPK_FN void* at(int64_t element) const { return static_cast<char*>(data) + element * width_of(dtype); }
};

MPK_FN int64_t bytes_read(const Row& row) { return row.size * width_of(row.dtype); }

// An op that needs several tensors at a time has its own type of row, with a size, a first_chunk and bytes_read.
template <class Row>
struct TableOf {
  const Row* rows;
  int32_t count;
  int32_t chunks;
  int64_t chunk_size;
};
using Table = TableOf<Row>;

// How many rows fit into the parameters of a CUDA launch. Further rows need device memory (rows.h).
template <class Row>
inline constexpr int kRowsInParameters = 32512 / sizeof(Row);

// Adjacent rows of a table that stays on the device from step to step, as many as one launch takes. The launch brings
// the addresses of their tensors (rows.h).
struct Stretch {
  static constexpr int kMostRows = 3500;  // 28,000 bytes of the launch's 32,764

  const Row* table;             // the whole table, of which `data` is not used
  const int32_t* row_of_chunk;  // saves a search, whose ten reads would wait for each other
  int64_t chunk_size;
  int32_t count;  // of rows in the whole table
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

// Finds the row that holds the chunk: the last row whose first_chunk is not above it.
template <class Row>
MPK_FN Span find_span(const Row* rows, int32_t count, int32_t chunk, int64_t chunk_size) {
  int32_t low = 0;
  for (int32_t high = count; high - low > 1;) {
    const int32_t middle = low + (high - low) / 2;
    (rows[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return span_at(rows, chunk, low, chunk_size);
}

// Returns the next chunk's span. After the table's last chunk, the result must not be used.
template <class Row>
inline Span next_span(const TableOf<Row>& table, const Span& span) {
  const bool same_row = span.row + 1 == table.count || table.rows[span.row + 1].first_chunk > span.chunk + 1;
  return span_at(table.rows, span.chunk + 1, same_row ? span.row : span.row + 1, table.chunk_size);
}

}  // namespace mpk
