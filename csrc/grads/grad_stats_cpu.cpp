#include "common/simd.h"
#include "grads/grad_stats.h"

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

// Squares of narrower formats are exact in fp64: an fma gives the same bits as a product and a sum.
static MPK_FN void add_squares(Doubles* sums, Floats x) {
  sums[0] = add_exact_square(sums[0], low_doubles(x));
  sums[1] = add_exact_square(sums[1], high_doubles(x));
}

// In the narrower formats the sum itself tells: the square of a finite one can't overflow fp64.
template <class T>
static Stats stats_of(const T* grads, int64_t size) {
  constexpr int count = kBlock / kLanesOf<double>;
  Doubles sums[count]{};
  for_each_block(grads, size, /*pad=*/T{}, [&](const T* block) {
    if constexpr (std::is_same_v<T, bf16>) {  // two a word, which take one instruction each to widen where they are
      for (int i = 0; i < kBlock / 2; i += kLanes) {
        const Words pairs = load_bytes<Words>(block + 2 * i);
        add_squares(sums + i / kLanesOf<double>, bit_cast<Floats>(pairs << 16));
        add_squares(sums + count / 2 + i / kLanesOf<double>, bit_cast<Floats>(pairs & 0xffff0000u));
      }
    } else {
      for (int i = 0; i < kBlock; i += kLanes) add_squares(sums + i / kLanesOf<double>, load(block + i));
    }
  });
  const double sumsq = sum_of_lanes(sums);
  return {sumsq, is_non_finite<double>(sumsq) ? 1.0 : 0.0};
}

Stats grad_stats_span(Dtype dtype, const void* grads, int64_t size) {
  return with_dtype(dtype, [&](auto zero) { return stats_of(static_cast<const decltype(zero)*>(grads), size); });
}

}  // namespace mpk::MPK_ISA
