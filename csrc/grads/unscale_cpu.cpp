#include "common/simd.h"
#include "grads/unscale.h"

namespace mpk::MPK_ISA {

template <class T>
static bool unscale_block_by_block(T* grads, int64_t size, float inv_scale) {
  decltype(magnitude(load(grads))) largest{};
  for_each_block(grads, size, /*pad=*/T{}, [&](T* block) {
    for (int i = 0; i < kBlock; i += kLanesOf<T>) {
      const auto value = unscale(load(block + i), inv_scale);
      store(block + i, value);
      largest = larger(largest, magnitude(value));
    }
  });
  return any(largest > static_cast<std::conditional_t<sizeof(Compute<T>) == 8, uint64_t, uint32_t>>(kLargestFinite<T>));
}

bool unscale_span(Dtype dtype, void* grads, int64_t size, float inv_scale) {
  return with_dtype(
      dtype, [&](auto zero) { return unscale_block_by_block(static_cast<decltype(zero)*>(grads), size, inv_scale); });
}

}  // namespace mpk::MPK_ISA
