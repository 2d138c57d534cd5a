// The chip's conversions, as cuda.h uses them, beside those in integers that every other kernel uses. Exit status 1,
// and a line that says where, if they differ in more than the payload of a NaN.
#include <cstdio>

#include "common/cuda.h"

using namespace mpk;

template <class T>
static bool is_same(float wide, uint32_t integers, const char* name) {
  T chip;
  narrow(wide, chip);
  constexpr uint32_t kInfinity = std::is_same_v<T, bf16> ? 0x7f80 : 0x7c00;
  const bool both_nan = (chip.bits & 0x7fffu) > kInfinity && (integers & 0x7fffu) > kInfinity;
  if (chip.bits == integers || both_nan) return true;
  printf("%s(%.9g) is %#x, not %#x\n", name, wide, chip.bits, integers);
  return false;
}

int main() {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const uint32_t chip = bit_cast<uint32_t>(widen(fp16{static_cast<uint16_t>(bits)}));
    const uint32_t integers = fp32_bits_of_fp16<float>(bits);
    if (chip != integers && (bits & 0x7fff) <= 0x7c00) {
      printf("fp16 %#x is %#x, not %#x\n", bits, chip, integers);
      return 1;
    }
  }
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += 255) {
    const uint32_t bits = static_cast<uint32_t>(first);
    const float wide = bit_cast<float>(bits);
    if (!is_same<bf16>(wide, bf16_bits_of_fp32(bits), "bf16")) return 1;
    if (!is_same<fp16>(wide, fp16_bits_of_fp32<float>(bits), "fp16")) return 1;
  }
  return 0;
}
