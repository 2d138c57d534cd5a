// Whether this library's CUDA runtime can work with the driver that is here. It need not be as old as torch's runtime.
#ifdef MPK_CUDA
#include <cuda_runtime.h>

// Returns CUDA's error, and sets version to the CUDA that the driver was made for, as 1000 * major + 10 * minor. It
// does not begin to use a device.
extern "C" __attribute__((visibility("default"))) int mpkernels_ask_driver(int* version) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  return error == cudaSuccess ? cudaDriverGetVersion(version) : error;
}
#endif
