#include "common/simd.h"
#include "grads/overflow.h"

namespace mpk::MPK_ISA {

template <class T>
static Overflow overflow_of(const T* grads, int64_t begin, int64_t size) {
  using C = Compute<T>;
  using F = std::conditional_t<std::is_same_v<C, double>, Doubles, Floats>;
  Tally<F> tally;
  Bits<F> at;
  for (int lane = 0; lane < kLanesOf<T>; ++lane) at[lane] = lane;
  for_each_block(grads, size, /*pad=*/T{}, [&](const T* block) {
    for (int i = 0; i < kBlock; i += kLanesOf<T>, at += kLanesOf<T>) count<C>(tally, load(block + i), at);
  });

  Overflow line = line_of(Tally<C>{}, begin);
  for (int lane = 0; lane < kLanesOf<T>; ++lane) {
    const Tally<C> lane_tally{tally.infs[lane], tally.nans[lane], tally.first[lane], tally.largest[lane],
                              tally.zeros[lane]};
    line = merge(line, line_of(lane_tally, begin));
  }
  line.zeros -= static_cast<double>((size + kBlock - 1) / kBlock * kBlock - size);  // the pads
  return line;
}

Overflow overflow_span(Dtype dtype, const void* grads, int64_t begin, int64_t size) {
  return with_dtype(dtype,
                    [&](auto zero) { return overflow_of(static_cast<const decltype(zero)*>(grads), begin, size); });
}

}  // namespace mpk::MPK_ISA
