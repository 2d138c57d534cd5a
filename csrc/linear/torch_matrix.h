// Matrices on the CPU, multiplied by torch's own kernels.
#pragma once

#include <cstdlib>

#include "common/huge_pages.h"
#include "common/torch.h"
#include "linear/matrix.h"

namespace mpk {

// Memory for one call, of a thread's own stock.
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
    void put_back(const Piece& piece) {  // the one that came first goes first
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
      : Scratch(rows * columns * 4), view(get(), rows, columns, torch_dtype) {}

  const Matrix view;
};

inline void multiply(const Matrix& out, const Matrix& a, const Matrix& b) {
  const Tensor result = out.tensor(), left = a.tensor(), right = b.tensor();
  require(aoti_torch_cpu_mm_out(result.handle(), left.handle(), right.handle()) == 0, "mpkernels",
          "torch could not multiply two matrices");
}

// out = a b + times c, where c may be out.
inline void multiply_add(const Matrix& out, const Matrix& a, const Matrix& b, const Matrix& c, double times = 1) {
  const Tensor result = out.tensor(), left = a.tensor(), right = b.tensor(), sum = c.tensor();
  require(aoti_torch_cpu_addmm_out(result.handle(), sum.handle(), left.handle(), right.handle(), times, 1) == 0,
          "mpkernels", "torch could not multiply two matrices");
}

// Calls body(first, last) for ranges of [0, count) on torch's own threads; each takes so many elements.
template <class Body>
void parallel_for(int64_t count, int64_t elements, const Body& body) {
  on_threads(count, 1 + kCpuChunk / (elements + 1), body);
}

}  // namespace mpk
