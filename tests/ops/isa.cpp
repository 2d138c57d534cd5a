// Runs every CPU kernel with every instruction set that this machine has, over all sizes up to three blocks, on random
// bits. If a result differs from baseline's by one bit, prints a line that says where, and exits with 1.
#include <cmath>
#include <cstdio>
#include <random>
#include <tuple>
#include <vector>

#include "grads/grad_stats.h"
#include "grads/overflow.h"
#include "grads/unscale.h"
#include "linear/linear_act.h"
#include "step/rules/adam.h"
#include "step/rules/adamw.h"
#include "step/rules/lion.h"
#include "step/rules/sgd.h"
#include "step/step.h"

using namespace mpk;

template <class Rule>
using StepSpan = decltype(&baseline::step_span<Rule>);

struct Variant {
  const char* name;
  bool (*unscale_span)(Dtype, void*, int64_t, float);
  Stats (*grad_stats_span)(Dtype, const void*, int64_t);
  std::tuple<StepSpan<Adam>, StepSpan<Adamw>, StepSpan<Lion>, StepSpan<Sgd>> step_spans;
  decltype(&baseline::overflow_span) overflow_span;
  decltype(&baseline::linear_act_rows) linear_act_rows;
  decltype(&baseline::linear_act_backward_rows) linear_act_backward_rows;
};
#define MPK_VARIANT(isa)                                                                     \
  {#isa,                                                                                     \
   isa::unscale_span,                                                                        \
   isa::grad_stats_span,                                                                     \
   {isa::step_span<Adam>, isa::step_span<Adamw>, isa::step_span<Lion>, isa::step_span<Sgd>}, \
   isa::overflow_span,                                                                       \
   isa::linear_act_rows,                                                                     \
   isa::linear_act_backward_rows}

static bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

static bool grad_ops_agree(const Variant& a, const Variant& b, Dtype dtype, const std::vector<uint64_t>& bits,
                           int64_t size) {
  auto left = bits, right = bits;
  const Stats stats[] = {a.grad_stats_span(dtype, left.data(), size), b.grad_stats_span(dtype, right.data(), size)};
  const bool bad[] = {a.unscale_span(dtype, left.data(), size, 0.37f),
                      b.unscale_span(dtype, right.data(), size, 0.37f)};
  const int64_t width = dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
  return memcmp(left.data(), right.data(), bits.size() * 8) == 0 && bad[0] == bad[1] && stats[0].bad == stats[1].bad &&
         same(stats[0].sumsq, stats[1].sumsq) && memcmp(left.data(), bits.data(), size * width) != 0;
}

enum class States { wide, bf16, int8 };  // wide: fp64 where the parameter is, else fp32

// Returns all that three steps of `size` elements leave in memory.
template <class Rule>
static std::vector<double> stepped(const Variant& variant, const typename Rule::Hyperparameters& hyperparameters,
                                   Dtype dtype, Master master, States states, int64_t size) {
  std::mt19937 random(size);
  std::normal_distribution<float> normal;
  std::vector<double> memory(7 * 1200);
  const auto array = [&](int which) { return &memory[which * 1200]; };
  float step = 0;
  StepRow row{array(0),
              array(1),
              {},
              master == Master::none ? nullptr : array(5),
              states == States::int8 ? reinterpret_cast<float*>(array(6)) : nullptr,
              &step,
              size,
              {},
              0,
              dtype,
              dtype,
              dtype == Dtype::f64      ? dtype
              : states == States::bf16 ? Dtype::b16
                                       : Dtype::f32,
              master};
  const StepGroup<Rule> group{hyperparameters, {}, {}, false};
  for (int i = 0; i < Rule::kStates; ++i) {
    row.states[i] = array(2 + i);
    if (states == States::int8 && Rule::kSigns[i] == Sign::not_negative) memset(array(2 + i), -128, size);
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
    std::get<StepSpan<Rule>>(variant.step_spans)(row, {0, 0, 0, size}, step_scalars(group, *row.step, shared));
  }
  return memory;
}

template <class Rule>
static bool steps_agree(const Variant& a, const Variant& b, int64_t size,
                        const typename Rule::Hyperparameters& hyperparameters) {
  const auto same = [&](Dtype dtype, Master master, States states) {
    const auto left = stepped<Rule>(a, hyperparameters, dtype, master, states, size);
    const auto right = stepped<Rule>(b, hyperparameters, dtype, master, states, size);
    return memcmp(left.data(), right.data(), left.size() * 8) == 0;
  };
  bool all = same(Dtype::f64, Master::none, States::wide);
  for (const States states : {States::wide, States::bf16, States::int8}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::b16}) all &= same(dtype, Master::none, states);
    for (const Dtype dtype : {Dtype::f16, Dtype::b16}) {
      for (const Master master : {Master::fp32, Master::split}) all &= same(dtype, master, states);
    }
  }
  return all;
}

static bool overflow_and_layers_agree(const Variant& a, const Variant& b, Dtype dtype,
                                      const std::vector<uint64_t>& bits, int64_t size) {
  const Overflow lines[] = {a.overflow_span(dtype, bits.data(), 5, size), b.overflow_span(dtype, bits.data(), 5, size)};
  if (memcmp(&lines[0], &lines[1], sizeof lines[0]) != 0) return false;
  if (dtype == Dtype::f64) return true;
  std::vector<uint64_t> results[2];  // only of an activation without an fma, which baseline lacks
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
          if (grad_ops_agree(variants[0], variant, dtype, bits, size) &&
              (mask == ~0ull || overflow_and_layers_agree(variants[0], variant, dtype, bits, size))) {
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
      const Variant& first = variants[0];
      if (steps_agree<Adamw>(first, variant, size, {0.01, 0.9, 0.999, 0.1, 1e-8}) &&
          steps_agree<Adam>(first, variant, size, {0.01, 0.9, 0.999, 0.1, 1e-8, 0}) &&
          steps_agree<Lion>(first, variant, size, {0.01, 0.9, 0.99, 0.1}) &&
          steps_agree<Sgd>(first, variant, size, {0.01, 0.1, 0.9, 0.2, 1})) {
        continue;
      }
      printf("%s steps otherwise than baseline: size %d\n", variant.name, static_cast<int>(size));
      return 1;
    }
  }
  for (const Variant& variant : variants) printf("%s ", variant.name);
  return 0;
}
