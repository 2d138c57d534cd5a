// What linear_act and linear_dact do on CUDA around the products of cuBLAS.
#pragma once

#include "linear/linear_act_cuda.h"
#include "linear/linear_act_torch.h"
#include "linear/torch_cublas.h"

namespace mpk {

// How many rows of z in fp32 to have at a time: of a product whose tiles fill whole waves of the chip's
// multiprocessors, as many waves as leave half of the L2 cache to what else is read and written, or one. cuBLAS chooses
// the tiles; these are its most common ones.
inline int64_t rows_at_once(const char* op, const Tensor& on_device_of, int64_t rows, int64_t columns) {
  constexpr int64_t kTile = 128, kTileBytes = kTile * kTile * sizeof(float);
  const int64_t wave = attribute_of_device(op, on_device_of, cudaDevAttrMultiProcessorCount);
  const int64_t cached = attribute_of_device(op, on_device_of, cudaDevAttrL2CacheSize) / 2 / kTileBytes;
  const int64_t tiles = std::max<int64_t>(cached / wave, 1) * wave, across = (columns + kTile - 1) / kTile;
  return std::min(rows, std::max<int64_t>(tiles / across, 1) * kTile);
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
