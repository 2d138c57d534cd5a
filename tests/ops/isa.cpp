// Runs every CPU kernel with every instruction set that this machine has, over all sizes up to three blocks, on random
// bits. Exit status 1, and a line that says where, if any result differs from baseline's by one bit.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "grads/grad_stats.h"
#include "grads/overflow.h"
#include "grads/unscale.h"
#include "linear/linear_act.h"
#include "step/rules/adamw.h"
#include "step/step.h"

using namespace mpk;

struct Variant {
  const char* name;
  bool (*unscale_span)(Dtype, void*, int64_t, float);
  Stats (*grad_stats_span)(Dtype, const void*, int64_t);
  decltype(&baseline::step_span<Adamw>) adamw_span;
  decltype(&baseline::overflow_span) overflow_span;
  decltype(&baseline::linear_act_rows) linear_act_rows;
  decltype(&baseline::linear_act_backward_rows) linear_act_backward_rows;
};
#define MPK_VARIANT(isa)  \
  {#isa,                  \
   isa::unscale_span,     \
   isa::grad_stats_span,  \
   isa::step_span<Adamw>, \
   isa::overflow_span,    \
   isa::linear_act_rows,  \
   isa::linear_act_backward_rows}

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

enum class Moments { wide, bf16, int8 };  // wide: fp64 where the parameter is, else fp32

// Everything that three steps of `size` elements leave behind.
static std::vector<double> stepped(const Variant& variant, Dtype dtype, Master master, Moments moments, int64_t size) {
  std::mt19937 random(size);
  std::normal_distribution<float> normal;
  std::vector<double> memory(7 * 1200);
  const auto array = [&](int which) { return &memory[which * 1200]; };
  float step = 0;
  StepRow row{array(0),
              array(1),
              {array(2), array(3), array(4)},
              master == Master::none ? nullptr : array(5),
              moments == Moments::int8 ? reinterpret_cast<float*>(array(6)) : nullptr,
              &step,
              size,
              {},
              0,
              dtype,
              dtype,
              dtype == Dtype::f64        ? dtype
              : moments == Moments::bf16 ? Dtype::b16
                                         : Dtype::f32,
              master};
  const StepGroup<Adamw> group{{0.01, 0.9, 0.999, 0.1, 1e-8}, {}, {}, false};
  if (moments == Moments::int8) {
    memset(array(3), -128, size);
    memset(array(4), -128, size);
  }
  const StepShared shared{nullptr, {}, nullptr, INFINITY, nullptr, nullptr, {}};
  for (; step < 3; ++step) {
    for (int64_t i = 0; i < size; ++i) {
      const float grad = normal(random);
      const auto bits = bit_cast<uint32_t>(grad);
      if (dtype == Dtype::f64) array(1)[i] = grad;
      if (dtype == Dtype::f32) memcpy(reinterpret_cast<float*>(array(1)) + i, &grad, 4);
      if (dtype == Dtype::b16) reinterpret_cast<uint16_t*>(array(1))[i] = bf16_bits_of_fp32(bits);
      if (dtype == Dtype::f16) reinterpret_cast<uint16_t*>(array(1))[i] = fp16_bits_of_fp32<float>(bits);
    }
    variant.adamw_span(row, {0, 0, 0, size}, step_scalars(group, *row.step, shared));
  }
  return memory;
}

static bool step_alike(const Variant& a, const Variant& b, int64_t size) {
  const auto same = [&](Dtype dtype, Master master, Moments moments) {
    const auto left = stepped(a, dtype, master, moments, size), right = stepped(b, dtype, master, moments, size);
    return memcmp(left.data(), right.data(), left.size() * 8) == 0;
  };
  bool all = same(Dtype::f64, Master::none, Moments::wide);
  for (const Moments moments : {Moments::wide, Moments::bf16, Moments::int8}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::b16}) all &= same(dtype, Master::none, moments);
    for (const Dtype dtype : {Dtype::f16, Dtype::b16}) {
      for (const Master master : {Master::fp32, Master::split}) all &= same(dtype, master, moments);
    }
  }
  return all;
}

static bool look_and_pass_alike(const Variant& a, const Variant& b, Dtype dtype, const std::vector<uint64_t>& bits,
                                int64_t size) {
  const Overflow lines[] = {a.overflow_span(dtype, bits.data(), 5, size), b.overflow_span(dtype, bits.data(), 5, size)};
  if (memcmp(&lines[0], &lines[1], sizeof lines[0]) != 0) return false;
  if (dtype == Dtype::f64) return true;
  std::vector<uint64_t> results[2];  // of activations without an fma, which baseline does not have
  for (int i = 0; i < 2; ++i) {
    const Variant& each = i == 0 ? a : b;
    auto& result = results[i] = std::vector<uint64_t>(4 * 110);
    const Activation relu2 = Activation::relu2;
    each.linear_act_rows({relu2, dtype, dtype, bits.data(), bits.data(), &result[0], &result[110]}, 1, size);
    each.linear_act_backward_rows(
        {relu2, dtype, dtype, bits.data(), bits.data(), nullptr, &result[220], reinterpret_cast<float*>(&result[330])},
        1, size);
  }
  return results[0] == results[1];
}

int main() {
  std::vector<Variant> variants{MPK_VARIANT(baseline)};
#ifdef MPK_X86
  if (best_isa() >= Isa::avx2) variants.push_back(MPK_VARIANT(avx2));
  if (best_isa() >= Isa::avx512) variants.push_back(MPK_VARIANT(avx512));
#endif
  std::mt19937_64 random(1);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::b16, Dtype::f64}) {
    // Without inf and NaN first, so that one of them doesn't hide what else goes wrong in a sum.
    for (const uint64_t mask : {0xbbffbbffbbffbbffull, ~0ull}) {
      for (int64_t size = 1; size <= 100; ++size) {
        std::vector<uint64_t> bits(110);
        for (uint64_t& word : bits) word = random() & mask;
        for (const Variant& variant : variants) {
          if (agree(variants[0], variant, dtype, bits, size) &&
              (mask == ~0ull || look_and_pass_alike(variants[0], variant, dtype, bits, size))) {
            continue;
          }
          printf("%s differs from baseline: dtype %d, size %d\n", variant.name, static_cast<int>(dtype),
                 static_cast<int>(size));
          return 1;
        }
      }
    }
  }
  for (const int64_t size : {1, 5, 31, 32, 100, 256, 257, 600}) {
    for (const Variant& variant : variants) {
      if (step_alike(variants[0], variant, size)) continue;
      printf("%s steps otherwise than baseline: size %d\n", variant.name, static_cast<int>(size));
      return 1;
    }
  }
  for (const Variant& variant : variants) printf("%s ", variant.name);
  return 0;
}
