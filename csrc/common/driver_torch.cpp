// Tells whether this library's CUDA runtime, which may be newer than torch's, can work with the installed driver.
#ifdef MPK_CUDA
#include <cuda_runtime.h>

// Returns CUDA's error, and sets version to the driver's CUDA version, as 1000 * major + 10 * minor. Initialises no
// device.
extern "C" __attribute__((visibility("default"))) int mpkernels_ask_driver(int* version) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  return error == cudaSuccess ? cudaDriverGetVersion(version) : error;
}
#endif
