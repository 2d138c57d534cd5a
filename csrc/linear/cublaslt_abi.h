// The part of cublasLt that is used here, declared by hand as cublas_abi.h is: a product with an epilogue, which is
// what comes over its elements before they are rounded.
#pragma once

#include "linear/cublas_abi.h"

namespace mpk {

// The values are those of cublasLt.h, the same from CUDA 12.0 to 13.2.
namespace cublaslt {

using cublas::Status, cublas::Type;
using Handle = struct LtContext*;
using Product = struct LtProduct*;
using Layout = struct LtLayout*;
using Preference = struct LtPreference*;

enum ProductAttribute : int {  // and the type of its value
  kTransposesA = 3,            // int32_t, cublas::Operation
  kTransposesB = 4,            // int32_t
  kEpilogue = 7,               // uint32_t
  kBias = 8,                   // const void*, of the result's type
  kAux = 11,                   // void*, of the result's type
  kAuxLeadingDimension = 12,   // int64_t, a multiple of 8
};
enum PreferenceAttribute : int {
  kMaxWorkspace = 1,      // uint64_t, bytes
  kReductionSchemes = 3,  // uint32_t
  kAlignmentOfA = 5,      // uint32_t, bytes; of B, C and D: the three values after it
  kAlignmentOfD = 8,
};
// An epilogue is a sum of these: bias, one element for each row, comes first, then gelu, the one with tanh, and aux is
// where to store what gelu is taken of. Or the product is multiplied by gelu's slope, at what is read from aux.
inline constexpr uint32_t kAddsBias = 4, kGelu = 32, kSlopeOfGelu = 64, kHasAux = 128;
inline constexpr uint32_t kReduceInComputeType = 2;  // else partial sums of a product may meet in 16 bits

// What a problem is solved with. It may be kept and used by any thread.
struct Algorithm {
  uint64_t opaque[8];
};
struct Proposal {
  Algorithm algorithm;
  size_t workspace;  // bytes
  Status status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Proposal) == 96);

struct Functions {
  Status (*create)(Handle*);
  Status (*create_product)(Product*, int compute, Type scale);
  Status (*set_of_product)(Product, ProductAttribute, const void* value, size_t bytes);
  Status (*destroy_product)(Product);
  Status (*create_layout)(Layout*, Type, uint64_t rows, uint64_t columns, int64_t leading_dimension);
  Status (*destroy_layout)(Layout);
  Status (*create_preference)(Preference*);
  Status (*set_of_preference)(Preference, PreferenceAttribute, const void* value, size_t bytes);
  Status (*destroy_preference)(Preference);
  Status (*propose)(Handle, Product, Layout a, Layout b, Layout c, Layout d, Preference, int wanted, Proposal*,
                    int* found);
  Status (*multiply)(Handle, Product, const void* alpha, const void* a, Layout, const void* b, Layout, const void* beta,
                     const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace, size_t bytes,
                     cudaStream_t);
};

// Thrown where cublasLt can't or won't: there is another way, and nothing has been written.
struct Refusal {
  std::string why;
};

// Throws a Refusal where the process has none, each time that it is called.
inline const Functions& functions() {
  static const Functions found = [] {
    void* const library = cublas::find_library();
    Functions it{};
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(library ? dlsym(library, name) : nullptr);
      if (!function) throw Refusal{std::string("the process's cuBLAS has no ") + name};
    };
    find(it.create, "cublasLtCreate");
    find(it.create_product, "cublasLtMatmulDescCreate");
    find(it.set_of_product, "cublasLtMatmulDescSetAttribute");
    find(it.destroy_product, "cublasLtMatmulDescDestroy");
    find(it.create_layout, "cublasLtMatrixLayoutCreate");
    find(it.destroy_layout, "cublasLtMatrixLayoutDestroy");
    find(it.create_preference, "cublasLtMatmulPreferenceCreate");
    find(it.set_of_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(it.destroy_preference, "cublasLtMatmulPreferenceDestroy");
    find(it.propose, "cublasLtMatmulAlgoGetHeuristic");
    find(it.multiply, "cublasLtMatmul");
    return it;
  }();
  return found;
}

// Of all other failures the caller hears.
inline bool is_refusal(Status status) {
  constexpr Status kInvalidValue = 7, kArchitectureMismatch = 8, kNotSupported = 15;
  return status == kInvalidValue || status == kArchitectureMismatch || status == kNotSupported;
}

}  // namespace cublaslt
}  // namespace mpk
