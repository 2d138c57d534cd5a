// All products of matrices are torch's, so that its switches and each chip's best library count here, too. torch gets
// new tensors over the same memory, which neither autograd nor autocast look at.
#pragma once

#include <cstdlib>
#include <optional>

#include "common/chunks_torch.h"
#include "common/huge_pages.h"
#include "common/registration_torch.h"
#include "common/stream_torch.h"
#include "linear/matrix.h"

namespace mpk {

// Memory for one call, from a stock that each thread keeps.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (bytes == 0) return;
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    auto& stock = Stock::of_this_thread();
    const auto fits = [&](const Piece& piece) { return piece.bytes >= bytes && piece.bytes <= 2 * bytes; };
    const auto found = std::find_if(stock.pieces.begin(), stock.pieces.end(), fits);
    if (found != stock.pieces.end()) {
      piece_ = *found;
      stock.pieces.erase(found);
      return;
    }
    piece_ = {std::aligned_alloc(kHugePage, bytes), bytes};
    require(piece_.memory, "mpkernels", "out of memory");
    ask_for_huge_pages(piece_.memory, bytes);
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    if (piece_.memory) Stock::of_this_thread().put_back(piece_);
  }
  void* get() const { return piece_.memory; }

 private:
  struct Piece {
    void* memory;
    int64_t bytes;
  };
  struct Stock {
    static constexpr int64_t kKept = 64 << 20;

    static Stock& of_this_thread() {
      static thread_local Stock stock;
      return stock;
    }
    void put_back(const Piece& piece) {  // frees the oldest pieces first
      pieces.push_back(piece);
      int64_t kept = 0;
      for (const Piece& each : pieces) kept += each.bytes;
      for (; kept > kKept; pieces.erase(pieces.begin())) {
        kept -= pieces.front().bytes;
        std::free(pieces.front().memory);
      }
    }
    ~Stock() {
      for (const Piece& piece : pieces) std::free(piece.memory);
    }
    std::vector<Piece> pieces;
  };

  Piece piece_{nullptr, 0};
};

// A matrix in memory of a thread's stock.
class ScratchMatrix : Scratch {
 public:
  ScratchMatrix(int64_t rows, int64_t columns, int32_t torch_dtype)
      : Scratch(rows * columns * 4), view(get(), rows, columns, torch_dtype, {aoti_torch_device_type_cpu(), -1}) {}

  const Matrix view;
};

inline void require_product(AOTITorchError error, const char* op = "mpkernels") {
  require(error == 0, op, "torch could not multiply two matrices");
}

template <size_t arguments>
void multiply_by(const char* op, const char* overload, StableIValue (&stack)[arguments]) {
  require_product(torch_call_dispatcher(op, overload, stack, kTorch2_10), op);
  Tensor{stack[0]};  // takes and drops the reference that torch returns
}

// In the emulation, a CPU's memory stands for CUDA's.
inline bool is_on_cpu(const Matrix& matrix) {
#ifdef MPK_EMULATION
  return false;
#else
  return matrix.device.first == aoti_torch_device_type_cpu();
#endif
}

// A factor of a product on the CPU, where torch's op is called past autograd: the tensor itself, if the matrix is all
// of it, because a new tensor takes as long as some small products.
class Factor {
 public:
  explicit Factor(const Matrix& matrix)
      : made_(matrix.is_whole() ? Tensor(StableIValue{}) : matrix.tensor()),
        handle_(matrix.is_whole() ? matrix.owner->handle() : made_.handle()) {}
  AtenTensorHandle handle() const { return handle_; }

 private:
  const Tensor made_;
  const AtenTensorHandle handle_;
};

// out = a b + times c, on the CPU. c may be a row that is added to each row; null is out. torch's op is called
// directly, because the dispatcher takes as long to find it by name as a small product takes.
inline void multiply_onto(const Matrix& out, const Matrix& a, const Matrix& b, const Tensor* c, double times = 1) {
  const Tensor result = out.tensor();
  const Factor left(a), right(b);
  require_product(aoti_torch_cpu_addmm_out(result.handle(), c ? c->handle() : result.handle(), left.handle(),
                                           right.handle(), times, 1));
}

// out = a b, in the dtype of a and b; on CUDA, out may also be fp32 for 16-bit a and b.
inline void multiply(const Matrix& out, const Matrix& a, const Matrix& b) {
  if (is_on_cpu(out)) return multiply_onto(out, a, b, /*c=*/nullptr, /*times=*/0);
  if (out.column_stride != 1 && out.row_stride == 1)  // else torch copies a matrix in some cases
    return multiply(out.transposed(), b.transposed(), a.transposed());
  if (out.dtype == a.dtype) {
    StableIValue stack[] = {a.tensor().release(), b.tensor().release(), out.tensor().release()};
    return multiply_by("aten::mm", "out", stack);
  }
  StableIValue stack[] = {a.tensor().release(), b.tensor().release(), 0, out.tensor().release()};
  memcpy(&stack[2], &out.torch_dtype, sizeof(out.torch_dtype));
  multiply_by("aten::mm", "dtype_out", stack);
}

// out = a weight^T + bias, rounded once; bias is a row, or missing. This is addmm, but aten::addmm takes numbers of a
// kind that torch's stable ABI lacks.
inline void multiply_and_add(const Matrix& out, const Matrix& a, const Matrix& weight,
                             const std::optional<Matrix>& bias) {
  if (!bias) return multiply(out, a, weight.transposed());
  if (is_on_cpu(out)) {
    const Tensor row = bias->vector();
    return multiply_onto(out, a, weight.transposed(), &row);
  }
  auto* const bias_value = new StableIValue(bias->vector().release());  // torch deletes it
  StableIValue stack[] = {a.tensor().release(), weight.tensor().release(), reinterpret_cast<StableIValue>(bias_value),
                          out.tensor().release()};
  multiply_by("aten::linear", "out", stack);
}

// Calls body(first, last) for ranges of [0, count) on torch's own threads. `elements` says how many each index covers.
template <class Body>
void parallel_for(int64_t count, int64_t elements, const Body& body) {
  on_threads(count, 1 + kCpuChunk / (elements + 1), body);
}

}  // namespace mpk
