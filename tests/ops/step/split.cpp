// Proves split.h's guarantee for all 2^32 masters. At the first that breaks it, prints a line and exits with 1. If a
// master comes back exactly, its weight is the nearest one, and on a tie the one further from zero: a remainder has 16
// bits, so it is within half a unit in the last place, and -32768 has no positive twin.
#include "step/split.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

#include "common/simd.h"

using namespace mpk;
using namespace mpk::MPK_ISA;

struct Way {
  const char* name;
  Split<Words> (*split_up)(Words);
  Words (*join)(const Split<Words>&);
  float (*weight)(uint16_t);
  uint32_t exact_from, inf_from;  // magnitudes, as bits: between them the master comes back bit for bit
  float bound;                    // below them: this close
};

static float of_bf16(uint16_t bits) { return bit_cast<float>(fp32_bits_of_bf16<uint32_t>(bits)); }
static float of_fp16(uint16_t bits) { return bit_cast<float>(fp32_bits_of_fp16<float>(bits)); }

static Split<Words> split_in_words(Words master) {
  const auto split = split_fp16<Floats>(master);
  return {widen(split.weight), split.remainder};
}
static Words join_in_words(const Split<Words>& split) {
  return join_fp16<Floats>({narrow(split.weight), split.remainder});
}

static const char* broken(const Way& way, uint32_t master, uint32_t weight_bits, uint32_t remainder, uint32_t joined) {
  const float x = bit_cast<float>(master), back = bit_cast<float>(joined);
  const float weight = way.weight(static_cast<uint16_t>(weight_bits));
  const uint32_t magnitude = master & 0x7fffffff;
  if (weight_bits > 0xffff || remainder > 0xffff) return "a half has more than 16 bits";
  if (std::signbit(x) != std::signbit(back) || std::signbit(x) != std::signbit(weight)) return "the sign is lost";
  if (std::isnan(x)) return std::isnan(back) && std::isnan(weight) ? nullptr : "NaN is lost";
  if (magnitude >= way.inf_from) return std::isinf(weight) && std::isinf(back) ? nullptr : "it isn't inf";
  if (magnitude >= way.exact_from) return joined == master ? nullptr : "the master isn't exact";
  return std::fabs(double(x) - double(back)) <= way.bound ? nullptr : "the master is beyond the bound";
}

int main() {
  const Way ways[] = {
      {"bf16", split_bf16<Words>, join_bf16<Words>, of_bf16, 0, 0x7f800000, 0},
      {"fp16", split_in_words, join_in_words, of_fp16, 0x38800000, 0x477ff000, 0x1p-40f},
  };
  for (const Way& way : ways) {
    std::atomic<bool> failed{false};
    const auto check = [&](uint64_t begin, uint64_t end) {
      for (uint64_t first = begin; first < end && !failed; first += kLanes) {
        Words masters;
        for (int lane = 0; lane < kLanes; ++lane) masters[lane] = static_cast<uint32_t>(first) + lane;
        const Split<Words> split = way.split_up(masters);
        const Words joined = way.join(split);
        // This settles most lanes at once. The rest, and a sample, go through `broken` one by one.
        const Floats off = bit_cast<Floats>(joined) - bit_cast<Floats>(masters);
        const auto close = (off <= way.bound) & (off >= -way.bound) & ((joined ^ masters) < 0x80000000u);
        const auto settled = (joined == masters) | (((masters & 0x7fffffffu) < way.exact_from) & close);
        const auto narrow = (split.weight | split.remainder) < 0x10000u;
        if (first % 65536 != 0 && !any(~(settled & narrow))) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
          const char* why = broken(way, masters[lane], split.weight[lane], split.remainder[lane], joined[lane]);
          if (!why) continue;
          if (!failed.exchange(true)) printf("%s, master %08x: %s\n", way.name, masters[lane], why);
          return;
        }
      }
    };
    std::thread other(check, 0, uint64_t{1} << 31);
    check(uint64_t{1} << 31, uint64_t{1} << 32);
    other.join();
    if (failed) return 1;
  }
  printf("all 2^32 masters hold\n");
  return 0;
}
