// What products.cpp and cublaslt.cpp share.
#pragma once

#include <vector>

#include "common/cuda.h"

namespace emulation {

enum Status {
  success = 0,
  not_initialized = 1,
  alloc_failed = 3,
  invalid_value = 7,
  execution_failed = 13,
  internal_error = 14,
  not_supported = 15,
};
inline int status_of(cudaError_t error) { return error == cudaSuccess ? success : execution_failed; }
enum { compute_in_fp32 = 68 };

inline bool find_dtype(int type, mpk::Dtype* dtype) {
  *dtype = type == 2 ? mpk::Dtype::f16 : type == 14 ? mpk::Dtype::b16 : mpk::Dtype::f32;
  return type == 0 || type == 2 || type == 14;
}

// The operand as it takes part, its rows (`lines` of them) contiguous.
inline std::vector<float> widened(const void* data, mpk::Dtype dtype, int64_t lines, int64_t terms, int64_t line_stride,
                                  int64_t term_stride) {
  std::vector<float> wide(lines * terms);
  mpk::with_dtype(dtype, [&](auto zero) {
    const auto* const from = static_cast<const decltype(zero)*>(data);
    for (int64_t i = 0; i < lines; ++i) {
      for (int64_t j = 0; j < terms; ++j) {
        wide[i * terms + j] = static_cast<float>(mpk::widen(from[i * line_stride + j * term_stride]));
      }
    }
  });
  return wide;
}

// Sixteen partial sums, as a GPU's threads hold parts of a long one.
inline float dot(const float* a, const float* b, int64_t size) {
  constexpr int parts = 16;
  float part[parts] = {};
  for (int64_t i = 0; i < size; ++i) part[i % parts] += a[i] * b[i];
  for (int half = parts / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

// Whether a graph that may be being captured stays out of what is allocated now.
inline bool may_allocate() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const bool relaxed = mode == cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  return relaxed;
}

}  // namespace emulation
