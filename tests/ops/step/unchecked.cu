// Compares the roots and quotients of csrc/step/unchecked.h with the chip's own, which are the nearest: the roots of
// all floats, the inverses of all significands, and some other quotients. Exits with 1 if one differs.
#include <cstdio>

#include "step/unchecked.h"

using namespace mpk;

static __device__ void expect(float got, float want, unsigned long long* misses) {
  if (bit_cast<uint32_t>(got) != bit_cast<uint32_t>(want) && !(got != got && want != want)) atomicAdd(misses, 1);
}

static __global__ void compare(unsigned long long* misses) {
  for (uint64_t bits = blockIdx.x * blockDim.x + threadIdx.x; bits < uint64_t{1} << 32;
       bits += gridDim.x * blockDim.x) {
    const float x = bit_cast<float>(static_cast<uint32_t>(bits)), root = __fsqrt_rn(x);
    expect(SquareRoot<Unchecked>::of(x).value, x < 0x1p64f ? root : NAN, misses);
    if (x >= 0x1p-100f && x < INFINITY) expect(NearRoot::of(x), root, misses);
    const float divisor = bit_cast<float>(static_cast<uint32_t>(bits) & 0x7fffff | 0x3f800000);
    const float dividend = bit_cast<float>(static_cast<uint32_t>(bits * 2654435761u) & 0x807fffff | 0x3f800000);
    expect((Unchecked(1.0f) / divisor).value, __fdiv_rn(1.0f, divisor), misses);
    expect((Unchecked(dividend) / divisor).value, __fdiv_rn(dividend, divisor), misses);
  }
}

int main() {
  unsigned long long *on_device, misses = 0;
  cudaMalloc(&on_device, sizeof misses);
  cudaMemset(on_device, 0, sizeof misses);
  compare<<<4096, 256>>>(on_device);
  const cudaError_t error = cudaMemcpy(&misses, on_device, sizeof misses, cudaMemcpyDeviceToHost);
  printf("%s, %llu differ\n", cudaGetErrorString(error), misses);
  return error != cudaSuccess || misses != 0;
}
