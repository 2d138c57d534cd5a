// A product with an ending, as cublasLt wants to be told, and notes of what came of it.
#pragma once

#include <optional>

#include "linear/cublaslt_abi.h"
#include "linear/torch_cublas.h"

namespace mpk {

namespace cublaslt {

// How many products of each op were made, and what kept others from it, how often: for `mpkernels doctor`.
struct Notes {
  static Notes& of_process() {
    static Notes& it = *new Notes;
    return it;
  }
  void add(const std::string& refusal) { count(refusals, refusal); }
  void add_product(const char* op) { count(products, op); }

  std::mutex mutex;
  std::map<std::string, int64_t> products, refusals;

 private:
  void count(std::map<std::string, int64_t>& each, const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++each[what];
  }
};

inline void check(Status status, const char* op, const char* function) {
  if (is_refusal(status))
    throw Refusal{std::string("cublasLt says ") + cublas::functions(op).status_name(status) + " in " + function};
  cublas::require_success(status, op, function);
}

template <class Descriptor>
class Owned {
 public:
  explicit Owned(Status (*destroy)(Descriptor)) : destroy_(destroy) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (it_ && destroy_(it_) != 0) Notes::of_process().add("cublasLt could not destroy a descriptor");
  }
  Descriptor* to_be_set() { return &it_; }
  operator Descriptor() const { return it_; }

 private:
  Status (*destroy_)(Descriptor);
  Descriptor it_ = nullptr;
};

// Of every pointer and of every row: what the widest loads need. So one algorithm serves all calls of a shape.
inline constexpr uint32_t kAlignment = 16;

inline bool is_aligned(const Matrix& it) {
  return reinterpret_cast<uintptr_t>(it.data) % kAlignment == 0 &&
         cublas::leading_dimension(it) * width_of(it.dtype) % kAlignment == 0;
}

// What is done to the sums of a product: bias is added to each row, gelu, the one with tanh, is taken of that, which is
// stored in z; or they are multiplied by gelu's slope at z.
struct Ending {
  std::optional<Matrix> bias;  // one row
  uint32_t gelu;               // 0, kGelu or kSlopeOfGelu
  std::optional<Matrix> z;
  uint32_t epilogue() const { return (bias ? kAddsBias : 0) | gelu | (z ? kHasAux : 0); }
  int64_t z_leading_dimension() const { return z ? cublas::leading_dimension(*z) : 0; }
};

inline const char* find_misfit(const Matrix& out, const Matrix& a, const Matrix& b, const Ending& ending) {
  if (ending.bias && !cublas::has_rows_in_line(*ending.bias)) return "bias is not contiguous";
  if (ending.z && !cublas::has_rows_in_line(*ending.z)) return "a row of saved is not contiguous, or overlaps another";
  if (!is_aligned(out) || !is_aligned(a) || !is_aligned(b) || (ending.bias && !is_aligned(*ending.bias)) ||
      (ending.z && !is_aligned(*ending.z)))
    return "a row of an argument or of a result does not begin at a multiple of 16 bytes";
  return nullptr;
}

// out = a b with an ending. cublasLt counts by columns: out^T = b^T a^T.
class Problem {
 public:
  Problem(const char* op, const Functions& functions, const Matrix& out, const Matrix& a, const Matrix& b,
          const Ending& ending)
      : op(op), lt(functions), out(out), a(a), b(b), ending(ending) {
    check(lt.create_product(product.to_be_set(), cublas::kComputeInFp32, cublas::kFp32), op,
          "cublasLtMatmulDescCreate");
    set<int32_t>(kTransposesA, cublas::operation(b));
    set<int32_t>(kTransposesB, cublas::operation(a));
    set<uint32_t>(kEpilogue, ending.epilogue());
    if (ending.z) set<int64_t>(kAuxLeadingDimension, ending.z_leading_dimension());
    describe(b, layout_of_b);
    describe(a, layout_of_a);
    describe(out, layout_of_out);
  }
  // All that an algorithm depends on.
  using Key = std::array<int64_t, 10>;
  Key key() const {
    return {ending.epilogue(),
            ending.z_leading_dimension(),
            static_cast<int64_t>(out.dtype),
            out.rows,
            out.columns,
            a.columns,
            cublas::operation(a),
            cublas::operation(b),
            cublas::leading_dimension(a),
            cublas::leading_dimension(b)};
  }
  void point_to(const void* bias, void* z) const {
    if (ending.bias) set(kBias, bias);
    if (ending.z) set(kAux, z);
  }

  const char* const op;
  const Functions& lt;
  const Matrix out, a, b;
  const Ending ending;
  Owned<Product> product{lt.destroy_product};
  Owned<Layout> layout_of_b{lt.destroy_layout}, layout_of_a{lt.destroy_layout}, layout_of_out{lt.destroy_layout};

 private:
  template <class Value>
  void set(ProductAttribute attribute, Value value) const {
    check(lt.set_of_product(product, attribute, &value, sizeof(Value)), op, "cublasLtMatmulDescSetAttribute");
  }
  void describe(const Matrix& it, Owned<Layout>& layout) const {
    const bool by_rows = cublas::operation(it) == cublas::kPlain;
    check(lt.create_layout(layout.to_be_set(), cublas::type_of(it.dtype), by_rows ? it.columns : it.rows,
                           by_rows ? it.rows : it.columns, cublas::leading_dimension(it)),
          op, "cublasLtMatrixLayoutCreate");
  }
};

}  // namespace cublaslt
}  // namespace mpk
