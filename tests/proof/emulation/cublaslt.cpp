// cublasLt on the CPU: what csrc/linear/cublaslt_torch.cpp finds. It refuses what the real one refuses, and what would
// be wrong here; it computes in fp32.
#include "cublaslt.h"

#include <dlfcn.h>

#include <cmath>
#include <string>

// Tests set these: which status a call fails with on demand, how many algorithms there are for a problem and with which
// status they are proposed, how many of the functions below the library has. And they read how many descriptors there
// are.
extern "C" {
__attribute__((visibility("default"))) int emulation_cublaslt_failure = 14, emulation_cublaslt_algorithms = 1,
                                           emulation_cublaslt_functions = 11, emulation_cublaslt_descriptors = 0,
                                           emulation_cublaslt_proposed = 0;
}

using namespace emulation;

namespace {

constexpr uint64_t magic = 0x4c74;

struct Context {};

int create_context(Context** handle) {
  if (fails_on_demand() || !may_allocate()) return alloc_failed;
  *handle = new Context;
  return success;
}
int create_product(Product** it, int compute, int scale) {
  if (compute != compute_in_fp32 || scale != 0) return not_supported;
  return create(it, Product{{{{trans_a, {4, 0}},
                              {trans_b, {4, 0}},
                              {epilogue, {4, 1}},
                              {bias_pointer, {8, 0}},
                              {aux_pointer, {8, 0}},
                              {aux_ld, {8, 0}}}}});
}
int set_of_product(Product* it, int attribute, const void* value, size_t bytes) {
  if (fails_on_demand()) return emulation_cublaslt_failure;
  return live(it) ? it->set(attribute, value, bytes) : invalid_value;
}
int create_layout(Layout** it, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  mpk::Dtype dtype;
  if (!find_dtype(type, &dtype) || ld < static_cast<int64_t>(rows)) return invalid_value;
  return create(it, Layout{type, rows, columns, ld});
}
int create_preference(Preference** it) {
  return create(it, Preference{{{{workspace_bytes, {8, 0}},
                                 {reduction, {4, 7}},
                                 {alignment_a, {4, 256}},
                                 {alignment_b, {4, 256}},
                                 {alignment_c, {4, 256}},
                                 {alignment_d, {4, 256}}}}});
}
int set_of_preference(Preference* it, int attribute, const void* value, size_t bytes) {
  if (fails_on_demand()) return emulation_cublaslt_failure;
  return live(it) ? it->set(attribute, value, bytes) : invalid_value;
}

struct Algorithm {
  uint64_t mark, problem, alignment, workspace, unused[4];
};
struct Proposal {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

int propose(Context* handle, Product* it, Layout* a, Layout* b, Layout* c, Layout* d, Preference* preference,
            int wanted, Proposal* proposals, int* found) {
  if (fails_on_demand()) return emulation_cublaslt_failure;
  if (!handle) return not_initialized;
  if (!live(it) || !live(a) || !live(b) || !live(c) || !live(d) || !live(preference) || wanted < 1 ||
      !is_valid(*it, *a, *b, *c, *d))
    return invalid_value;
  if (!is_supported((*it)[epilogue])) return not_supported;
  // The real one might add in 16 bits: that is not wanted here.
  if ((*preference)[reduction] != 2) return internal_error;
  *found = std::min(wanted, emulation_cublaslt_algorithms);
  uint64_t alignment = 0;
  for (int each = alignment_a; each <= alignment_d; ++each) alignment = std::max(alignment, (*preference)[each]);
  for (const int each : {int{bias_pointer}, int{aux_pointer}}) {
    if ((*it)[each]) alignment = std::max(alignment, alignment_of(it->pointer<void>(each)));
  }
  const uint64_t workspace = std::min<uint64_t>((*preference)[workspace_bytes], 4096);
  if (*found)
    proposals[0] = {
        {magic, problem_of(*it, *a, *b, *d), alignment, workspace, {}}, workspace, emulation_cublaslt_proposed, 1, {}};
  return success;
}

float tanh_in_gelu(float z) { return tanhf(0.7978845608f * (z + 0.044715f * z * z * z)); }

float finish(uint64_t last, float z) {
  if (last & relu) return fmaxf(z, 0);  // which drops NaN, as the real one does
  return last & tanh_gelu ? 0.5f * z * (1 + tanh_in_gelu(z)) : z;
}
float slope(float z) {
  const float t = tanh_in_gelu(z);
  return 0.5f * (1 + t) + 0.5f * z * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * z * z);
}

int multiply(Context* handle, Product* it, const float* alpha, const void* a, Layout* a_layout, const void* b,
             Layout* b_layout, const float* beta, const void* c, Layout* c_layout, void* d, Layout* d_layout,
             const Algorithm* algorithm, char* workspace, size_t bytes, cudaStream_t stream) {
  if (fails_on_demand()) return emulation_cublaslt_failure;
  if (!handle) return not_initialized;
  if (!is_current(stream)) return execution_failed;  // which nobody takes for a refusal
  if (!live(it) || !live(a_layout) || !live(b_layout) || !live(c_layout) || !live(d_layout) || !alpha || !beta ||
      *beta != 0 || c != d || !is_valid(*it, *a_layout, *b_layout, *c_layout, *d_layout) || algorithm->mark != magic ||
      algorithm->problem != problem_of(*it, *a_layout, *b_layout, *d_layout) || bytes < algorithm->workspace)
    return invalid_value;
  for (const void* each : {a, b, const_cast<const void*>(d), it->pointer<const void>(bias_pointer),
                           it->pointer<const void>(aux_pointer)}) {
    if (each && alignment_of(each) < algorithm->alignment) return invalid_value;
  }
  const bool ta = (*it)[trans_a], tb = (*it)[trans_b];
  const int64_t m = d_layout->rows, n = d_layout->columns, k = ta ? a_layout->rows : a_layout->columns;
  const int64_t lda = a_layout->ld, ldb = b_layout->ld, aux_line = (*it)[aux_ld];
  const uint64_t last = (*it)[epilogue];
  mpk::Dtype in, out;
  find_dtype(a_layout->type, &in), find_dtype(d_layout->type, &out);
  ++emulation_launches;
  return status_of(enqueue(stream, [=, by = *alpha, product = *it, ldd = d_layout->ld] {
    if (bytes > 0) workspace[0] = workspace[bytes - 1] = 0;
    const auto wide_a = widened(a, in, m, k, ta ? lda : 1, ta ? 1 : lda);
    const auto wide_b = widened(b, in, n, k, tb ? 1 : ldb, tb ? ldb : 1);
    mpk::with_dtype(out, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (!std::is_same_v<T, double>) {
        const T* const bias = product.pointer<const T>(bias_pointer);
        T *const to = static_cast<T*>(d), *const aux = product.pointer<T>(aux_pointer);
        for (int64_t i = 0; i < m * n; ++i) {
          const int64_t row = i % m, column = i / m;
          float z = by * dot(&wide_a[row * k], &wide_b[column * k], k);
          if (last & adds_bias) z += mpk::widen(bias[row]);
          T* const of_aux = last & has_aux ? &aux[column * aux_line + row] : nullptr;
          if (last & slope_of_gelu)
            z *= slope(mpk::widen(*of_aux));
          else if (of_aux)
            mpk::narrow(z, *of_aux);
          mpk::narrow(finish(last, z), to[column * ldd + row]);
        }
      }
    });
    return cudaSuccess;
  }));
}

const struct {
  const char* name;
  void* function;
} functions[] = {
    {"cublasLtCreate", reinterpret_cast<void*>(create_context)},
    {"cublasLtMatmulDescCreate", reinterpret_cast<void*>(create_product)},
    {"cublasLtMatmulDescSetAttribute", reinterpret_cast<void*>(set_of_product)},
    {"cublasLtMatmulDescDestroy", reinterpret_cast<void*>(destroy<Product>)},
    {"cublasLtMatrixLayoutCreate", reinterpret_cast<void*>(create_layout)},
    {"cublasLtMatrixLayoutDestroy", reinterpret_cast<void*>(destroy<Layout>)},
    {"cublasLtMatmulPreferenceCreate", reinterpret_cast<void*>(create_preference)},
    {"cublasLtMatmulPreferenceSetAttribute", reinterpret_cast<void*>(set_of_preference)},
    {"cublasLtMatmulPreferenceDestroy", reinterpret_cast<void*>(destroy<Preference>)},
    {"cublasLtMatmulAlgoGetHeuristic", reinterpret_cast<void*>(propose)},
    {"cublasLtMatmul", reinterpret_cast<void*>(multiply)},
};

}  // namespace

// Hidden like all else here: only this library's own calls arrive.
void* dlopen(const char* name, int) noexcept {
  static int library;
  return std::string(name) == "libtorch_cuda.so" ? &library : nullptr;
}
void* dlsym(void*, const char* function) noexcept {
  for (int i = 0; i < emulation_cublaslt_functions; ++i) {
    if (!strcmp(functions[i].name, function)) return functions[i].function;
  }
  return nullptr;
}
