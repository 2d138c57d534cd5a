// What linear_act and linear_dact do on CUDA around the products of cuBLAS.
#pragma once

#include "linear/linear_act_cuda.h"
#include "linear/linear_act_torch.h"
#include "linear/torch_cublas.h"

namespace mpk {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many rows of z in fp32 to have at a time: no more than the L2 caches of large chips hold until the pass has read
// them, in blocks of equal length, of whole tiles of a product.
inline int64_t rows_at_once(int64_t rows, int64_t columns) {
  constexpr int64_t kMost = int64_t{32} << 20, kTile = 256;
  const int64_t tiles = divide_up(rows, kTile), most = std::max<int64_t>(1, kMost / (4 * columns * kTile));
  return std::min(rows, divide_up(tiles, divide_up(tiles, most)) * kTile);
}

inline Strided strided(const Matrix& it) { return Strided(it.data, it.row_stride, it.column_stride, it.dtype); }

// dbias, of shape [0] where it is not wanted, and the rows of sums that it is the sum of, unless it is one.
class ColumnSums {
 public:
  ColumnSums(const Tensor& dbias, int64_t blocks)
      : blocks_(blocks),
        columns_(dbias.size()),
        scratch_(dbias, has_parts() ? blocks : 0, columns_, aoti_torch_dtype_float32()),
        dbias_{columns_ > 0 ? dbias.data() : nullptr, Matrix(dbias).dtype} {}
  Result of_block(int64_t block) const { return has_parts() ? Result{scratch_.view.at(block), Dtype::f32} : dbias_; }
  void add_up(const char* op, cudaStream_t stream) const {
    if (!has_parts()) return;
    const float* const parts = static_cast<float*>(scratch_.view.data);
    require_success(add_up_cuda(parts, dbias_, blocks_, columns_, stream), op);
  }

 private:
  bool has_parts() const { return blocks_ > 1 && columns_ > 0; }

  const int64_t blocks_, columns_;
  const OwnMatrix scratch_;
  const Result dbias_;
};

}  // namespace mpk
