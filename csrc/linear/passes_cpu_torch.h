// What the linear ops do on the CPU around the products that torch makes.
#pragma once

#include "linear/linear_act.h"
#include "linear/linear_gated.h"
#include "linear/products_torch.h"

namespace mpk {

// How many rows a partial sum adds up one by one in fp32, whatever the number of threads. n equal rows lose n / 8 eps.
inline constexpr int64_t kRowsOfSum = 16;
inline constexpr int64_t kBlockBytes = 16 << 20, kLeastRows = 2 * kRowsOfSum;  // of z or dz in fp32

// Returns how many rows to compute at a time: at least one, and no more than there are.
inline int64_t rows_in_block(int64_t rows, int64_t columns) {
  const int64_t fit = std::max<int64_t>(kBlockBytes / (4 * columns + 1) / kRowsOfSum * kRowsOfSum, kLeastRows);
  return std::max<int64_t>(1, std::min(fit, rows));
}

// Calls body(first row, number of rows) for each block. Without a row there is one block, whose sums are 0.
template <class Body>
void in_blocks(int64_t rows, int64_t block, const Body& body) {
  int64_t first = 0;
  do {
    body(first, std::min(block, rows - first));
    first += block;
  } while (first < rows);
}

// Whether torch multiplies 16-bit matrices as they are: on CPUs with instructions for it, as on a GPU. Other CPUs are
// several times slower at that than in fp32; there, matrices are widened, multiplied in fp32 and narrowed.
inline bool multiplies_halves(Dtype dtype) {
#ifdef MPK_HALF_PRODUCTS  // tests compile either way for any CPU
  return dtype != Dtype::f32 && MPK_HALF_PRODUCTS;
#else
  static const HalfProducts cpu = half_products();
  return dtype == Dtype::f16 ? cpu.fp16 : dtype == Dtype::b16 && cpu.bf16;
#endif
}

// A matrix, or a copy of it in another format or layout.
struct Widened {
  Widened borrowed() const { return {view, nullptr}; }

  Matrix view;
  std::unique_ptr<ScratchMatrix> memory;
};

inline Widened in_scratch(const Matrix& like, int32_t torch_dtype) {
  auto memory = std::make_unique<ScratchMatrix>(like.rows, like.columns, torch_dtype);
  return {memory->view, std::move(memory)};
}

inline Widened contiguous(const Matrix& matrix) {
  if (matrix.is_contiguous()) return {matrix, nullptr};
  Widened copy = in_scratch(matrix, matrix.torch_dtype);
  copy.view.tensor().copy_from(matrix.tensor());
  return copy;
}

inline Widened widen(const Matrix& matrix) {
  if (matrix.dtype == Dtype::f32) return {matrix, nullptr};
  const bool has_rows = matrix.column_stride == 1 || matrix.columns == 1 || matrix.rows * matrix.columns == 0;
  if (!has_rows && matrix.row_stride == 1) {
    Widened other = widen(matrix.transposed());
    return {other.view.transposed(), std::move(other.memory)};
  }
  if (!has_rows) return widen(contiguous(matrix).view);
  Widened wide = in_scratch(matrix, aoti_torch_dtype_float32());
  const auto widen_span = MPK_BEST(widen_span);
  parallel_for(matrix.rows, matrix.columns, [&](int64_t row, int64_t last) {
    for (; row < last; ++row)
      widen_span(matrix.dtype, matrix.at(row), static_cast<float*>(wide.view.at(row)), matrix.columns);
  });
  return wide;
}

inline void narrow(const Matrix& wide, const Matrix& to) {
  const auto narrow_span = MPK_BEST(narrow_span);
  parallel_for(wide.rows, wide.columns, [&](int64_t first, int64_t last) {
    narrow_span(to.dtype, static_cast<const float*>(wide.at(first)), to.at(first), (last - first) * wide.columns);
  });
}

// Computes dz from dy and saved, and y from a saved z, some rows at a time; and the sums of dz's columns over all rows.
class BackwardPass {
 public:
  BackwardPass(Activation activation, Dtype dtype, int64_t rows, int64_t columns, bool adds_up)
      : activation_(activation),
        dtype_(dtype),
        adds_up_(adds_up),
        sums_(std::max<int64_t>(1, chunks_in(rows)), adds_up ? columns : 0, aoti_torch_dtype_float32()) {}

  // All matrices are contiguous, hold the rows from first (a multiple of kRowsOfSum) on, and may share memory.
  void run(int64_t first, const Matrix& dy, const Matrix& saved, const Matrix* dz, const Matrix* narrow_dz,
           const Matrix* y) const {
    const auto linear_act_backward_rows = MPK_BEST(linear_act_backward_rows);
    parallel_for(std::max<int64_t>(1, chunks_in(dy.rows)), kRowsOfSum * dy.columns, [&](int64_t chunk, int64_t end) {
      for (; chunk < end; ++chunk) {
        const int64_t row = chunk * kRowsOfSum;
        linear_act_backward_rows(
            {activation_, dy.dtype, dtype_, dy.at(row), saved.at(row), dz ? static_cast<float*>(dz->at(row)) : nullptr,
             narrow_dz ? narrow_dz->at(row) : nullptr, y ? y->at(row) : nullptr,
             adds_up_ ? sums_of((first + row) / kRowsOfSum) : nullptr},
            std::min(kRowsOfSum, dy.rows - row), dy.columns);
      }
    });
  }

  void add_up(const Matrix& dbias) const {
    const auto narrow_span = MPK_BEST(narrow_span);
    parallel_for(dbias.columns, sums_.view.rows, [&](int64_t column, int64_t last) {
      for (; column < last; ++column) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < sums_.view.rows; ++chunk) sum += sums_of(chunk)[column];
        const float rounded = static_cast<float>(sum);
        narrow_span(dbias.dtype, &rounded, dbias.transposed().at(column), 1);
      }
    });
  }

 private:
  static int64_t chunks_in(int64_t rows) { return (rows + kRowsOfSum - 1) / kRowsOfSum; }
  float* sums_of(int64_t chunk) const { return static_cast<float*>(sums_.view.at(chunk)); }

  const Activation activation_;
  const Dtype dtype_;
  const bool adds_up_;
  const ScratchMatrix sums_;
};

// The passes around torch's products of 16-bit matrices.
class CpuPasses {
 public:
  CpuPasses(const char*, const Tensor&) {}

  void activate(Activation activation, const Matrix& z, const Matrix& y) const {
    const auto linear_act_rows = MPK_BEST(linear_act_rows);
    parallel_for(z.rows, z.columns, [&](int64_t row, int64_t last) {
      linear_act_rows({activation, z.dtype, y.dtype, z.at(row), nullptr, y.at(row), nullptr}, last - row, z.columns);
    });
  }
  // A null dz, y or dbias isn't wanted. dbias gets the sums of dz's columns.
  void differentiate(Activation activation, const Matrix& dy, const Matrix& saved, const Matrix* dz, const Matrix* y,
                     const Matrix* dbias) const {
    const Widened from = contiguous(dy),
                  known = saves(activation) == Saves::nothing ? from.borrowed() : contiguous(saved);
    const BackwardPass pass(activation, dy.dtype, dy.rows, dy.columns, dbias != nullptr);
    pass.run(0, from.view, known.view, nullptr, dz, y);
    if (dbias) pass.add_up(*dbias);
  }
  void gate(Activation activation, const Matrix& z, const Matrix& h) const {
    const auto linear_gated_rows = MPK_BEST(linear_gated_rows);
    parallel_for(z.rows, z.columns, [&](int64_t row, int64_t last) {
      linear_gated_rows({activation, z.dtype, h.dtype, z.at(row), nullptr, nullptr, h.at(row), nullptr}, last - row,
                        h.columns);
    });
  }
  // dh may be fp32, and lie in h's memory.
  void differentiate_gate(Activation activation, const Matrix& dh, const Matrix& z, const Matrix& dz,
                          const Matrix* h) const {
    const Widened from = contiguous(dh), known = contiguous(z);
    const auto linear_dgated_rows = MPK_BEST(linear_dgated_rows);
    parallel_for(dh.rows, dz.columns, [&](int64_t row, int64_t last) {
      linear_dgated_rows(
          {activation, dh.dtype, dz.dtype, from.view.at(row), known.view.at(row), dz.at(row), h ? h->at(row) : nullptr},
          last - row, dh.columns);
    });
  }
  // out is the sum of two 16-bit results: the rounded product, and what rounding took from the product.
  void multiply_to_fp32(const Matrix& out, const Matrix& a, const Matrix& b) const {
    const ScratchMatrix high(out.rows, out.columns, a.torch_dtype), low(out.rows, out.columns, a.torch_dtype);
    multiply(high.view, a, b);
    const Tensor rounded = high.view.tensor();
    multiply_onto(low.view, a, b, &rounded, -1);
    const auto add_span = MPK_BEST(add_span);
    parallel_for(out.rows, out.columns, [&](int64_t first, int64_t last) {
      add_span(a.dtype, high.view.at(first), low.view.at(first), static_cast<float*>(out.at(first)),
               (last - first) * out.columns);
    });
  }
};

}  // namespace mpk
