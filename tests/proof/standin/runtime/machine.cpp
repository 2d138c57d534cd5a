// Settings, the lock, errors.
#include "machine.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

using namespace standin;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t failure = cudaSuccess;  // of a kernel

Settings read_settings() {
  Settings it;
  std::string order = "lazy";
  Dl_info here;
  dladdr(reinterpret_cast<void*>(read_settings), &here);
  std::ifstream file(std::filesystem::canonical(here.dli_fname).replace_filename("settings"));
  file >> order >> it.devices >> it.driver >> it.peers >> it.protects;
  for (int capability; file >> capability;) it.capabilities.push_back(capability);
  it.order = order == "lazy" ? Order::lazy : order == "eager" ? Order::eager : Order::random;
  if (it.order == Order::random) it.random.seed(1 + atoi(order.c_str() + strlen("random:")));
  if (it.capabilities.empty()) it.capabilities = {90};
  return it;
}

struct Text {
  cudaError_t error;
  const char *name, *text;
};
#define TEXT(name, text) {name, #name, text}
const Text kTexts[] = {
    TEXT(cudaSuccess, "no error"),
    TEXT(cudaErrorInvalidValue, "invalid argument"),
    TEXT(cudaErrorMemoryAllocation, "out of memory"),
    TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    TEXT(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    TEXT(cudaErrorInvalidDeviceFunction, "invalid device function"),
    TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    TEXT(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    TEXT(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    TEXT(cudaErrorNotReady, "device not ready"),
    TEXT(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    TEXT(cudaErrorNotSupported, "operation not supported"),
    TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    TEXT(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    TEXT(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    TEXT(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    TEXT(cudaErrorStreamCaptureImplicit,
         "operation would make the legacy stream depend on a capturing blocking stream"),
    TEXT(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread"),
    TEXT(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
};
const Text& text_of(cudaError_t error) {
  for (const Text& it : kTexts)
    if (it.error == error) return it;
  static const Text unknown{error, "unrecognized error code", "unrecognized error code"};
  return unknown;
}

}  // namespace

Settings& standin::settings() {
  static Settings it = read_settings();
  return it;
}

std::recursive_mutex& standin::machine() {
  static auto& it = *new std::recursive_mutex;  // outlives whoever frees memory at the end of the process
  return it;
}

void standin::say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("stand-in: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

cudaError_t standin::fail(cudaError_t error, const char* why) {
  if (error != cudaSuccess) last_error = error;
  if (error != cudaSuccess && *why) say("%s: %s", text_of(error).name, why);
  return error;
}

cudaError_t standin::outcome() { return fail(failure); }

API cudaError_t cudaGetLastError() { return std::exchange(last_error, failure); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
API const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }

API cudaError_t standin_fail(cudaError_t error) { return fail(error); }
API cudaError_t standin_refuse(const char* function) {
  say("nobody stands in for %s", function);
  return fail(cudaErrorNotSupported);
}
API void standin_kernel_failed(const char* why) {
  say("a kernel failed: %s", why);
  failure = cudaErrorLaunchFailure;
}
