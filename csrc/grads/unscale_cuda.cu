#include "common/rows.h"
#include "grads/unscale.h"

namespace mpk {

// One block per chunk.
template <class Rows>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const Rows __grid_constant__ grads, float* found_inf, const float* inv_scale) {
  const Span span = span_of_block(grads);
  const Row& row = row_at(grads, span.row);
  const float factor = *inv_scale;
  const bool bad = with_dtype(row.dtype, [&](auto zero) {
    using T = decltype(zero);
    bool bad = false;
    for_each_element(static_cast<T*>(row.at(span.begin)), span.size, [&](T& grad) {
      const Compute<T> value = unscale(widen(grad), factor);
      narrow(value, grad);
      bad |= is_non_finite<T>(value);
    });
    return bad;
  });
  if (bad) *found_inf = 1.0f;  // benign race: every writer stores 1
}

cudaError_t unscale_cuda(const Table& grads, Row* memory, float* found_inf, const float* inv_scale,
                         cudaStream_t stream) {
  return with_rows(grads, memory, stream, [&](const auto& rows) {
    return launch(unscale_kernel<std::decay_t<decltype(rows)>>, grads.chunks, stream, rows, found_inf, inv_scale);
  });
}

}  // namespace mpk
