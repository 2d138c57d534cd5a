// Products that cublasLt ends before it rounds: in a bias and gelu_tanh, with z beside it, or in gelu_tanh's slope at
// z. They are linear_act and linear_dact under second names, which mpkernels.tune alone chooses. Where cublasLt can't
// or won't, product and pass compute. cublasLt comes from the library that torch has loaded.
#ifdef MPK_CUDA

#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>

#include "linear/linear_dact_torch.h"
#include "linear/products_torch.h"

namespace mpk {

namespace cublaslt {

// The values are those of cublasLt.h, the same from CUDA 12.0 to 13.2.
using Status = int;
inline constexpr Status kInvalidValue = 7, kArchitectureMismatch = 8, kNotSupported = 15;
using Handle = struct Context*;
using Descriptor = struct Opaque*;  // of a product, of a matrix's layout, or of what is preferred
inline constexpr int kFp32 = 0, kFp16 = 2, kBf16 = 14, kComputeInFp32 = 68;
inline constexpr int kTransposesA = 3, kTransposesB = 4, kEpilogue = 7, kBias = 8, kAux = 11, kAuxLeadingDimension = 12;
inline constexpr int kMaxWorkspace = 1, kReductionSchemes = 3, kAlignmentOfA = 5, kAlignmentOfD = 8;
// An epilogue is a sum of these. bias, one element for each row, comes first; aux is where gelu's argument is stored.
inline constexpr uint32_t kPlain = 1, kAddsBias = 4, kGelu = 32, kSlopeOfGelu = 64, kHasAux = 128;
inline constexpr uint32_t kReduceInComputeType = 2;  // else partial sums of a product may meet in 16 bits
inline constexpr uint32_t kAlignment = 16;           // of every pointer and row: what the widest loads need
inline constexpr uint64_t kWorkspace = uint64_t{32} << 20;

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;  // bytes
  Status status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96);
struct Refusal {};  // thrown before anything is written; product and pass compute instead

// Calls a function of cublasLt's, each of whose arguments must have the very type that cublasLt.h declares.
template <class... Arguments>
void call(const char* name, Arguments... arguments) {
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);  // dlsym looks into what that needs, too
  const auto function = reinterpret_cast<Status (*)(Arguments...)>(library ? dlsym(library, name) : nullptr);
  const Status status = function ? function(arguments...) : kNotSupported;
  if (status == kInvalidValue || status == kArchitectureMismatch || status == kNotSupported) throw Refusal{};
  require(status == 0, name, "cublasLt fails with status " + std::to_string(status));
}

struct Owned {
  explicit Owned(const char* destroy) : destroy(destroy) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    try {
      if (it) call(destroy, it);
    } catch (...) {  // a destructor can't raise, and what is lost is a few bytes
    }
  }
  const char* const destroy;
  Descriptor it = nullptr;
};

inline bool has_rows_in_line(const Matrix& it) {
  return (it.columns <= 1 || it.column_stride == 1) && (it.rows <= 1 || it.row_stride >= it.columns);
}
inline int64_t leading_dimension(const Matrix& it) {
  if (!has_rows_in_line(it)) return leading_dimension(it.transposed());
  return it.rows > 1 ? it.row_stride : it.columns;
}
inline bool fits(const Matrix& it, bool may_be_transposed) {
  return (has_rows_in_line(it) || (may_be_transposed && has_rows_in_line(it.transposed()))) &&
         reinterpret_cast<uintptr_t>(it.data) % kAlignment == 0 &&
         leading_dimension(it) * width_of(it.dtype) % kAlignment == 0;
}

// out = a b with an ending; false where cublasLt can't or won't. It counts by columns: out^T = b^T a^T.
inline bool multiply(const Tensor& there, cudaStream_t stream, const Matrix& out, const Matrix& a, const Matrix& b,
                     const std::optional<Matrix>& bias, uint32_t gelu, const std::optional<Matrix>& z) {
  if (out.dtype == Dtype::f32 || a.columns == 0 || !fits(out, false) || !fits(a, true) || !fits(b, true) ||
      (bias && !fits(*bias, false)) || (z && !fits(*z, false)))
    return false;
  try {
    Owned product("cublasLtMatmulDescDestroy"), of_a("cublasLtMatrixLayoutDestroy"),
        of_b("cublasLtMatrixLayoutDestroy"), of_out("cublasLtMatrixLayoutDestroy");
    call("cublasLtMatmulDescCreate", &product.it, kComputeInFp32, kFp32);
    const auto set = [&](int attribute, auto value) {
      call("cublasLtMatmulDescSetAttribute", product.it, attribute, static_cast<const void*>(&value), sizeof value);
    };
    const auto describe = [&](const Matrix& it, Owned& layout) {
      const bool by_rows = has_rows_in_line(it);
      call("cublasLtMatrixLayoutCreate", &layout.it, it.dtype == Dtype::f16 ? kFp16 : kBf16,
           static_cast<uint64_t>(by_rows ? it.columns : it.rows), static_cast<uint64_t>(by_rows ? it.rows : it.columns),
           leading_dimension(it));
      return int32_t{!by_rows};
    };
    const int32_t transposes_b = describe(b, of_b), transposes_a = describe(a, of_a);
    describe(out, of_out);
    set(kTransposesA, transposes_b);
    set(kTransposesB, transposes_a);
    const uint32_t ending = (bias ? kAddsBias : 0) | gelu | (z ? kHasAux : 0), epilogue = ending ? ending : kPlain;
    set(kEpilogue, epilogue);
    const int64_t z_line = z ? leading_dimension(*z) : 0;
    if (z) set(kAuxLeadingDimension, z_line);
    const auto point_to = [&](const void* of_bias, void* of_z) {
      if (bias) set(kBias, of_bias);
      if (z) set(kAux, of_z);
    };

    // A handle for each device, which threads share, and an algorithm for each shape. They live as long as the process.
    struct Known {
      std::mutex mutex;
      std::map<int32_t, Handle> handles;
      std::map<std::array<int64_t, 11>, Heuristic> proposals;
    };
    static Known& known = *new Known;
    const int32_t device = there.device().second;
    std::unique_lock<std::mutex> lock(known.mutex);
    if (!known.handles[device]) {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // what it allocates is no part of a CUDA graph
      (void)cudaThreadExchangeStreamCaptureMode(&mode);           // which fails for no mode that there is
      call("cublasLtCreate", &known.handles[device]);
      (void)cudaThreadExchangeStreamCaptureMode(&mode);
    }
    const Handle handle = known.handles[device];
    const auto int64 = [](auto... all) { return std::array{static_cast<int64_t>(all)...}; };
    const auto key = int64(device, epilogue, z_line, out.dtype, out.rows, out.columns, a.columns, transposes_a,
                           transposes_b, leading_dimension(a), leading_dimension(b));
    auto proposal = known.proposals.find(key);  // which stays where it is when others join it
    if (proposal == known.proposals.end()) {
      Owned preference("cublasLtMatmulPreferenceDestroy");
      call("cublasLtMatmulPreferenceCreate", &preference.it);
      const auto prefer = [&](int attribute, auto value) {
        call("cublasLtMatmulPreferenceSetAttribute", preference.it, attribute, static_cast<const void*>(&value),
             sizeof value);
      };
      prefer(kMaxWorkspace, kWorkspace);
      prefer(kReductionSchemes, kReduceInComputeType);
      for (int each = kAlignmentOfA; each <= kAlignmentOfD; ++each) prefer(each, kAlignment);
      // cublasLt reads nothing here; it looks at the pointers' alignment.
      point_to(reinterpret_cast<void*>(kAlignment), reinterpret_cast<void*>(kAlignment));
      Heuristic made{};
      int count = 0;
      call("cublasLtMatmulAlgoGetHeuristic", handle, product.it, of_b.it, of_a.it, of_out.it, of_out.it, preference.it,
           1, &made, &count);
      if (count == 0 || made.status != 0) throw Refusal{};
      proposal = known.proposals.emplace(key, made).first;
    }
    const Heuristic& it = proposal->second;
    lock.unlock();
    const Tensor workspace = there.scratch(it.workspace);
    const float one = 1, zero = 0;
    point_to(bias ? bias->data : nullptr, z ? z->data : nullptr);
    const auto read = [](const void* it) { return it; };
    call("cublasLtMatmul", handle, product.it, read(&one), read(b.data), of_b.it, read(a.data), of_a.it, read(&zero),
         read(out.data), of_out.it, out.data, of_out.it, read(it.algorithm), workspace.data(), it.workspace, stream);
  } catch (const Refusal&) {
    return false;
  }
  return true;
}

}  // namespace cublaslt

// cublasLt's relu is left alone: it makes a 0 of NaN.
static void linear_act_by_cublaslt(StableIValue* stack, uint64_t, uint64_t) {
  forward(stack, [](const LinearActArguments& it, const Matrix* saved, const Matrix& y) {
    const OnDeviceOf device(it.x);
    const uint32_t gelu = it.activation == Activation::gelu_tanh ? cublaslt::kGelu : 0;
    if ((!gelu && it.activation != Activation::none) ||
        !cublaslt::multiply(it.x, device.stream(), y, Matrix(it.x), Matrix(it.weight).transposed(), as_matrix(it.bias),
                            gelu, saved ? std::optional(*saved) : std::nullopt))
      activate_product_on_cuda(it, saved ? *saved : y, y);
  });
}
MPK_CUDA_KERNEL("linear_act_by_cublaslt", linear_act_by_cublaslt)

// cublasLt serves where neither h is wanted, which our pass makes on its way, nor dbias, which would be a sum of
// rounded numbers.
static void linear_dact_by_cublaslt(StableIValue* stack, uint64_t, uint64_t) {
  const LinearDactArguments it(stack);
  const OnDeviceOf device(it.dy);
  Slopes to(it);
  const bool is_served = it.activation == Activation::gelu_tanh && !it.wants_dbias() && !it.wants_h;
  if (!is_served || to.of_z.size() == 0 ||
      !cublaslt::multiply(it.dy, device.stream(), to.dz, Matrix(it.dy), Matrix(it.weight), std::nullopt,
                          cublaslt::kSlopeOfGelu, Matrix(it.saved)))
    differentiate_product_on_cuda(it, to);
  to.return_to(stack);
}
MPK_CUDA_KERNEL("linear_dact_by_cublaslt", linear_dact_by_cublaslt)

}  // namespace mpk

#endif
