// Kernels whose costs test_sass.py derives by hand, and faults planted in them. Blocks have 256 threads.

constexpr int kRounds = 3;

// A thread has four loads of 16 bytes on the way at once, in each of kRounds rounds.
__global__ void copy(const uint4* from, uint4* to) {
  for (int round = 0; round < kRounds; ++round) {
    const int first = (blockIdx.x * kRounds + round) * 1024 + threadIdx.x;
    uint4 held[4];
    for (int i = 0; i < 4; ++i) held[i] = from[first + 256 * i];
    for (int i = 0; i < 4; ++i) to[first + 256 * i] = held[i];
  }
}

// Each number has a sector of 32 bytes to itself.
__global__ void strided_copy(const float* from, float* to) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  to[i] = from[8 * i];
}

// The first load says where the second one goes.
__global__ void chain(const int* places, const float* from, float* to) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  to[i] = from[places[i]];
}

struct Rates {
  float of_block[64];
};

// The sound one of the kernels below: both loads at once, a number for all lanes from constant memory.
__global__ void blend(const float4* a, const float4* b, float4* to, const __grid_constant__ Rates rates) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  const float rate = rates.of_block[blockIdx.x % 64];
  const float4 x = a[i], y = b[i];
  to[i] = make_float4(x.x + rate * y.x, x.y + rate * y.y, x.z + rate * y.z, x.w + rate * y.w);
}

__global__ void blend_loads_behind_a_use(const float4* a, const float4* b, float4* to,
                                         const __grid_constant__ Rates rates) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  const float rate = rates.of_block[blockIdx.x % 64];
  const float4 x = a[i];
  const float4 y = x.x > -1e30f ? b[i] : x;
  to[i] = make_float4(x.x + rate * y.x, x.y + rate * y.y, x.z + rate * y.z, x.w + rate * y.w);
}

__global__ void blend_pow_a_thread(const float4* a, const float4* b, float4* to, const __grid_constant__ Rates rates) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  const float4 x = a[i], y = b[i];
  const double known_late = rates.of_block[blockIdx.x % 64] + 0 * x.x;
  const float rate = static_cast<float>(1 - pow(known_late, 7.5));
  to[i] = make_float4(x.x + rate * y.x, x.y + rate * y.y, x.z + rate * y.z, x.w + rate * y.w);
}

__global__ void blend_lane_by_lane(const float4* a, const float4* b, float4* to, const __grid_constant__ Rates rates) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  const float rate = rates.of_block[i % 64];
  const float4 x = a[i], y = b[i];
  to[i] = make_float4(x.x + rate * y.x, x.y + rate * y.y, x.z + rate * y.z, x.w + rate * y.w);
}

// A warp writes a row of 32 numbers and reads a column: all lanes ask the same bank, unless a row has an odd length.
template <int length>
__device__ void transpose(const float* from, float* to) {
  __shared__ float tile[8][32 * length / 4];
  float* const own = tile[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, i = blockIdx.x * 256 + threadIdx.x;
  own[lane * length / 4] = from[i];
  __syncwarp();
  to[i] = own[(31 - lane) * length / 4];
}
__global__ void mirror(const float* from, float* to) { transpose<4>(from, to); }
__global__ void mirror_in_few_banks(const float* from, float* to) { transpose<32>(from, to); }
