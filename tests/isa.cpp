// Runs every CPU kernel with every instruction set that this machine has, over all sizes up to three blocks, on random
// bits. Exit status 1, and a line that says where, if any result differs from baseline's by one bit.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "grad_stats.h"
#include "unscale.h"

using namespace mpk;

struct Variant {
  const char* name;
  bool (*unscale_span)(Dtype, void*, int64_t, float);
  Stats (*grad_stats_span)(Dtype, const void*, int64_t);
};

static bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

static bool agree(const Variant& a, const Variant& b, Dtype dtype, const std::vector<uint64_t>& bits, int64_t size) {
  auto left = bits, right = bits;
  const Stats stats[] = {a.grad_stats_span(dtype, left.data(), size), b.grad_stats_span(dtype, right.data(), size)};
  const bool bad[] = {a.unscale_span(dtype, left.data(), size, 0.37f),
                      b.unscale_span(dtype, right.data(), size, 0.37f)};
  const int64_t width = dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
  return memcmp(left.data(), right.data(), bits.size() * 8) == 0 && bad[0] == bad[1] && stats[0].bad == stats[1].bad &&
         same(stats[0].sumsq, stats[1].sumsq) && memcmp(left.data(), bits.data(), size * width) != 0;
}

int main() {
  std::vector<Variant> variants{{"baseline", baseline::unscale_span, baseline::grad_stats_span}};
#ifdef MPK_X86
  if (best_isa() >= Isa::avx2) variants.push_back({"avx2", avx2::unscale_span, avx2::grad_stats_span});
  if (best_isa() >= Isa::avx512) variants.push_back({"avx512", avx512::unscale_span, avx512::grad_stats_span});
#endif
  std::mt19937_64 random(1);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::b16, Dtype::f64}) {
    // Without inf and NaN first, so that one of them doesn't hide what else goes wrong in a sum.
    for (const uint64_t mask : {0xbbffbbffbbffbbffull, ~0ull}) {
      for (int64_t size = 1; size <= 100; ++size) {
        std::vector<uint64_t> bits(110);
        for (uint64_t& word : bits) word = random() & mask;
        for (const Variant& variant : variants) {
          if (agree(variants[0], variant, dtype, bits, size)) continue;
          printf("%s differs from baseline: dtype %d, size %d\n", variant.name, static_cast<int>(dtype),
                 static_cast<int>(size));
          return 1;
        }
      }
    }
  }
  for (const Variant& variant : variants) printf("%s ", variant.name);
  return 0;
}
