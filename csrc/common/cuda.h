// Vocabulary of the CUDA kernels: 16-byte access, block sums, the launch itself. Plain C++ apart from the qualifiers,
// so that tests/proof/emulation can run the same kernels on a CPU.
#pragma once

#include <cuda_runtime.h>

#include "common/table.h"

namespace mpk {

inline constexpr int kThreads = 256;
inline constexpr int kPacksInFlight = 4;  // independent 16-byte loads a thread issues before it uses the first

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float widen(fp16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
__device__ __forceinline__ void narrow(float wide, fp16& x) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(wide));
}
#else
inline float widen(fp16 x) { return bit_cast<float>(fp32_bits_of_fp16<float>(x.bits)); }
inline void narrow(float wide, fp16& x) { x.bits = fp16_bits_of_fp32<float>(bit_cast<uint32_t>(wide)); }
#endif

// Each of these two is one instruction since sm_80. The emulation runs the code for older chips.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ void narrow(float wide, bf16& x) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(wide));
}
static __device__ uint32_t warp_max(uint32_t value) { return __reduce_max_sync(0xffffffff, value); }
#else
__device__ __forceinline__ void narrow(float wide, bf16& x) { x.bits = bf16_bits_of_fp32(bit_cast<uint32_t>(wide)); }
static __device__ uint32_t warp_max(uint32_t value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value = larger(value, __shfl_xor_sync(0xffffffff, value, lanes));
  return value;
}
#endif
__device__ __forceinline__ float widen(bf16 x) { return bit_cast<float>(fp32_bits_of_bf16<uint32_t>(x.bits)); }
template <class T>
__device__ __forceinline__ T widen(T x) {
  return x;
}
template <class T>
__device__ __forceinline__ void narrow(T wide, T& x) {
  x = wide;
}

// Tells the compiler that a pointer points to global memory, which it knows only of pointers in a kernel's parameters.
template <class T>
__device__ __forceinline__ T* in_global(T* pointer) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Calls body(element&) for this thread's share of a block's data, and stores the elements back where T isn't const.
// Accesses are 16 bytes wide, except before the first 16-byte boundary and after the last.
template <class T, class Body>
__device__ __forceinline__ void for_each_element(T* data, int64_t size, const Body& body) {
  using Element = std::remove_const_t<T>;
  constexpr int pack_size = sizeof(uint4) / sizeof(T);
  struct Pack {
    Element elements[pack_size];
  };
  using Raw = std::conditional_t<std::is_const_v<T>, const uint4, uint4>;
  data = in_global(data);
  const int64_t before = -(reinterpret_cast<uintptr_t>(data) / sizeof(T)) % pack_size;
  const int64_t head = before < size ? before : size, packs = (size - head) / pack_size;
  Raw* const raw = reinterpret_cast<Raw*>(data + head);

  for (int64_t first = threadIdx.x; first < packs; first += kThreads * kPacksInFlight) {
    uint4 held[kPacksInFlight];
#pragma unroll
    for (int i = 0; i < kPacksInFlight; ++i) {
      if (first + i * kThreads < packs) held[i] = raw[first + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kPacksInFlight; ++i) {
      if (first + i * kThreads >= packs) break;
      Pack pack = bit_cast<Pack>(held[i]);
      for (Element& element : pack.elements) body(element);
      if constexpr (!std::is_const_v<T>) raw[first + i * kThreads] = bit_cast<uint4>(pack);
    }
  }
  const int64_t packed = packs * pack_size;
  static_assert(2 * pack_size <= kThreads);
  if (threadIdx.x < size - packed) {
    const int64_t i = threadIdx.x < head ? threadIdx.x : threadIdx.x + packed;
    Element element = data[i];
    body(element);
    if constexpr (!std::is_const_v<T>) data[i] = element;
  }
}

// Joins the values of a block's threads in a fixed order. `join` must be commutative, and associative apart from
// rounding. Every thread gets the result.
template <class Join>
__device__ double block_join(double value, const Join& join) {
  __shared__ double warp_values[kThreads / 32];
  for (int lanes = 16; lanes > 0; lanes /= 2) value = join(value, __shfl_xor_sync(0xffffffff, value, lanes));
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  double joined = warp_values[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) joined = join(joined, warp_values[warp]);
  __syncthreads();  // before the next call writes warp_values
  return joined;
}

static __device__ double block_sum(double value) {
  return block_join(value, [](double a, double b) { return a + b; });
}

// Returns true in every thread of the last of `expected` blocks that call this with the same ticket. The ticket starts
// at 0, and is 0 again afterwards. The last block may then read what thread 0 of the others wrote before, past the L1
// cache (__ldcg).
static __device__ bool last_one_out(uint32_t* ticket, uint32_t expected) {
  __shared__ bool is_last;
  __syncthreads();  // so that this block's threads have read all that the last block may change
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(ticket, expected - 1) == expected - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace mpk
