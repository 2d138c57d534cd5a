// Stands where tests/proof/emulation/runtime.cpp does: the same emulated kernels, as work of the stand-in's streams.
// All else that they ask of CUDA they ask of the stand-in.
#include "../emulation/runtime.h"

extern "C" {
cudaError_t standin_enqueue(cudaStream_t, void (*work)(void*), void (*drop)(void*), void* context);
cudaError_t standin_fail(cudaError_t error);
void standin_kernel_failed(const char* why);
int emulation_launches = 0;
}

// Tests of errors that CUDA doesn't have of itself run under the emulation alone.
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
