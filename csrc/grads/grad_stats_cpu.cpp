#include "common/simd.h"
#include "grads/grad_stats.h"

namespace mpk::MPK_ISA {

// A block is 4 pairs of neighbouring packs. Each lane of a Quad adds up one pair, so that every instruction set makes
// the same additions in fp64.
inline constexpr int kPair = 2 * kSumPack, kPairs = 4, kBlockOfPacks = kPairs * kPair;
typedef double Quad __attribute__((vector_size(32)));

#if defined(__AVX2__)
typedef float Lanes __attribute__((vector_size(32)));
typedef uint32_t LaneWords __attribute__((vector_size(32)));

// Adds neighbours: each 16 bytes of the result hold two sums of u, then two of v.
static MPK_FN Lanes add_neighbours(Lanes u, Lanes v) {
  return _mm256_shuffle_ps(u, v, 0x88) + _mm256_shuffle_ps(u, v, 0xdd);
}
static MPK_FN bool is_any(LaneWords mask) {
  return !_mm256_testz_si256(bit_cast<__m256i>(mask), bit_cast<__m256i>(mask));
}
static MPK_FN Lanes load_lanes(const float* from) { return load_bytes<Lanes>(from); }
static MPK_FN Lanes load_lanes(const fp16* from) { return _mm256_cvtph_ps(load_bytes<__m128i>(from)); }
static MPK_FN Quad sum_of_pairs(const Lanes (&sums)[1]) {
  return _mm256_cvtps_pd(_mm256_castps256_ps128(sums[0])) + _mm256_cvtps_pd(_mm256_extractf128_ps(sums[0], 1));
}
#else
typedef Floats Lanes;
typedef Words LaneWords;

static MPK_FN Lanes add_neighbours(Lanes u, Lanes v) {
  return Lanes{u[0], u[2], v[0], v[2]} + Lanes{u[1], u[3], v[1], v[3]};
}
static MPK_FN bool is_any(LaneWords mask) { return any(mask); }
template <class T>
static MPK_FN Lanes load_lanes(const T* from) {
  return load(from);
}
static MPK_FN Quad sum_of_pairs(const Lanes (&sums)[2]) {
  const Doubles pair_sums[] = {low_doubles(sums[0]) + low_doubles(sums[1]),
                               high_doubles(sums[0]) + high_doubles(sums[1])};
  return bit_cast<Quad>(pair_sums);
}
#endif
inline constexpr int kSums = 8 * sizeof(float) / sizeof(Lanes);

// Returns the squares of a vector of elements. For bf16, returns sums of two neighbours' squares, because one
// instruction widens either neighbour in its place.
template <class T>
static MPK_FN Lanes squares(const T* from) {
  const Lanes x = load_lanes(from);
  return x * x;
}
static MPK_FN Lanes squares(const bf16* from) {
  const LaneWords neighbours = load_bytes<LaneWords>(from);
  const Lanes first = bit_cast<Lanes>(neighbours << 16), second = bit_cast<Lanes>(neighbours & 0xffff0000u);
  return first * first + second * second;
}

// Adds up each 16 bytes of four vectors, which begin a pair of packs apart.
template <class T>
static MPK_FN Lanes sums_of_four(const T* from) {
  return add_neighbours(add_neighbours(squares(from), squares(from + kPair)),
                        add_neighbours(squares(from + 2 * kPair), squares(from + 3 * kPair)));
}

// Writes the sums of the four pairs' first packs, then of their second packs.
template <class T>
static MPK_FN void sums_of_packs(const T* block, Lanes (&sums)[kSums]) {
  constexpr bool has_two_in_a_word = std::is_same_v<T, bf16>;
#if defined(__AVX2__)
  if constexpr (has_two_in_a_word) {
    sums[0] = sums_of_four(block);
  } else {
    const Lanes first = sums_of_four(block), second = sums_of_four(block + kSumPack);
    sums[0] = _mm256_permute2f128_ps(first, second, 0x20) + _mm256_permute2f128_ps(first, second, 0x31);
  }
#else
  for (int i = 0; i < kSums; ++i) {
    const T* const pack = block + i * kSumPack;
    sums[i] = sums_of_four(pack);
    if constexpr (!has_two_in_a_word) sums[i] += sums_of_four(pack + kSumPack / 2);
  }
#endif
}

template <class T>
static bool is_zero(const T* block) {
  constexpr uint64_t magnitudes = sizeof(T) == 4 ? 0x7fffffff7fffffff : 0x7fff7fff7fff7fff;
  uint64_t words[kBlockOfPacks * sizeof(T) / sizeof(uint64_t)], bits = 0;
  memcpy(words, block, sizeof words);
  for (const uint64_t word : words) bits |= word & magnitudes;
  return bits == 0;
}

static MPK_FN float widen(float x) { return x; }
static MPK_FN float widen(bf16 x) { return bit_cast<float>(fp32_bits_of_bf16<uint32_t>(x.bits)); }
static MPK_FN float widen(fp16 x) { return bit_cast<float>(fp32_bits_of_fp16<float>(x.bits)); }

// As sum_of_pairs, but adds up a pack in fp64 if its sum is_beyond_fp32.
template <class T>
static __attribute__((noinline)) Quad careful_sum_of_pairs(const T* block, const Lanes (&sums)[kSums]) {
  if (is_zero(block)) return Quad{};
  float narrow[2][kPairs];
  memcpy(narrow, sums, sizeof narrow);
  double wide[2][kPairs];
  for (int which = 0; which < 2; ++which) {
    for (int pair = 0; pair < kPairs; ++pair) {
      float x[kSumPack];
      for (int i = 0; i < kSumPack; ++i) x[i] = widen(block[pair * kPair + which * kSumPack + i]);
      const float sum = narrow[which][pair];
      wide[which][pair] = is_beyond_fp32(bit_cast<uint32_t>(sum)) ? wide_sum_of_squares(x) : sum;
    }
  }
  return bit_cast<Quad>(wide[0]) + bit_cast<Quad>(wide[1]);
}

struct Sum {
  Quad sum{};

  template <class T>
  MPK_FN void add(const T* block) {
    Lanes sums[kSums];
    sums_of_packs(block, sums);
    LaneWords beyond{};
    for (const Lanes& each : sums) beyond |= bit_cast<LaneWords>(is_beyond_fp32(bit_cast<LaneWords>(each)));
    sum += __builtin_expect(is_any(beyond), 0) ? careful_sum_of_pairs(block, sums) : sum_of_pairs(sums);
  }
  MPK_FN void add(const double* block) {
    for (int i = 0; i < kBlockOfPacks; i += kSumPack) {
      double x[kSumPack];
      memcpy(x, block + i, sizeof x);
      for (const double each : x) bad |= is_non_finite<double>(each);
      sum[0] += sum_of_squares(x);
    }
  }
  void join(const Sum& other) {
    sum += other.sum;
    bad |= other.bad;
  }
  uint64_t bad =
      0;  // fp64 grads only. In narrower formats the sum shows an inf or NaN: finite squares can't overflow it
};

// A span's quarters are read side by side: one core reads four streams faster than one.
inline constexpr int kStreams = 4;

template <class T>
static Stats stats_of(const T* grads, int64_t size) {
  const int64_t quarter = size / kBlockOfPacks / kStreams * kBlockOfPacks;
  Sum stream_sums[kStreams], &all = stream_sums[0];
  for (int64_t i = 0; i < quarter; i += kBlockOfPacks) {
    for (int stream = 0; stream < kStreams; ++stream) stream_sums[stream].add(grads + stream * quarter + i);
  }
  int64_t i = kStreams * quarter;
  for (; i + kBlockOfPacks <= size; i += kBlockOfPacks) all.add(grads + i);
  if (i < size) {
    T last[kBlockOfPacks]{};
    memcpy(last, grads + i, (size - i) * sizeof(T));
    all.add(last);
  }
  for (int stream = 1; stream < kStreams; ++stream) all.join(stream_sums[stream]);
  const Quad& sum = all.sum;
  const double sumsq = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  const bool is_finite = sizeof(T) == sizeof(double) ? all.bad == 0 : !is_non_finite<double>(sumsq);
  return {sumsq, is_finite ? 0.0 : 1.0};
}

Stats grad_stats_span(Dtype dtype, const void* grads, int64_t size) {
  return with_dtype(dtype, [&](auto zero) { return stats_of(static_cast<const decltype(zero)*>(grads), size); });
}

}  // namespace mpk::MPK_ISA
