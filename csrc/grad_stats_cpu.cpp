#include "common/simd.h"
#include "grad_stats.h"

namespace mpk::MPK_ISA {

static Stats stats_of(const double* grads, int64_t size) {
  Doubles sums[kBlock / kLanesOf<double>]{};
  decltype(is_non_finite<double>(sums[0])) bad{};
  for_each_block(grads, size, /*pad=*/0.0, [&](const double* block) {
    for (Doubles& sum : sums) {
      const Doubles x = load(block + (&sum - sums) * kLanesOf<double>);
      sum += square(x);
      bad |= is_non_finite<double>(x);
    }
  });
  return {sum_of_lanes(sums), any(bad) ? 1.0 : 0.0};
}

// In the narrower formats the sum itself tells: the square of a finite one can't overflow fp64.
template <class T>
static Stats stats_of(const T* grads, int64_t size) {
  Doubles sums[kBlock / kLanesOf<double>]{};
  for_each_block(grads, size, /*pad=*/T{}, [&](const T* block) {
    for (int i = 0; i < kBlock; i += kLanesOf<T>) {
      const Floats x = load(block + i);
      Doubles* const sum = sums + i / kLanesOf<double>;
      sum[0] += square(low_doubles(x));
      sum[1] += square(high_doubles(x));
    }
  });
  const double sumsq = sum_of_lanes(sums);
  return {sumsq, is_non_finite<double>(sumsq) ? 1.0 : 0.0};
}

Stats grad_stats_span(Dtype dtype, const void* grads, int64_t size) {
  return with_dtype(dtype, [&](auto zero) { return stats_of(static_cast<const decltype(zero)*>(grads), size); });
}

}  // namespace mpk::MPK_ISA
