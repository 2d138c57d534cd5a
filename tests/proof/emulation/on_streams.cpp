// Takes the place of runtime.cpp in tests/proof/standin: the emulated kernels are work of the stand-in's streams, and
// the stand-in has CUDA's other functions.
#include "../emulation/runtime.h"

extern "C" {
cudaError_t standin_enqueue(cudaStream_t, void (*work)(void*), void (*drop)(void*), void* context);
cudaError_t standin_fail(cudaError_t error);
void standin_kernel_failed(const char* why);
int emulation_launches = 0;
}

// Only runtime.cpp lets tests make calls fail.
bool emulation::fails_on_demand() { return false; }

cudaError_t emulation::enqueue(cudaStream_t stream, const std::function<cudaError_t()>& work) {
  using Work = std::function<cudaError_t()>;
  const auto run = [](void* context) { (void)(*static_cast<Work*>(context))(); };
  const auto drop = [](void* context) { delete static_cast<Work*>(context); };
  return standin_enqueue(stream, run, drop, new Work(work));
}

cudaError_t emulation::launch(const cudaLaunchConfig_t* config, const std::function<void()>& thread) {
  if (!config) return standin_fail(cudaErrorInvalidValue);
  if (!is_launchable(*config)) return standin_fail(cudaErrorInvalidConfiguration);
  ++emulation_launches;
  return enqueue(config->stream, [config = *config, thread] {
    const std::string failure = run_grid(config.gridDim, config.blockDim, thread);
    if (!failure.empty()) standin_kernel_failed(failure.c_str());
    return failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
  });
}
