#include "linear_act_torch.h"

#include <atomic>

#include "common/torch_matrix.h"

namespace mpk {

static constexpr int64_t kRowsOfSum = 32;         // partial sums of so many rows, whatever the number of threads
static constexpr int64_t kBlockBytes = 16 << 20;  // of z or dz in fp32

static int64_t rows_in_block(int64_t columns) {
  return std::max<int64_t>(kBlockBytes / (4 * columns + 1) / kRowsOfSum * kRowsOfSum, kRowsOfSum);
}

// 16-bit matrices are widened, multiplied in fp32 and narrowed, for most CPUs take several times as long to multiply
// them as they are. Where there are instructions for it, it is torch that multiplies them, and what is rounded is
// rounded as torch rounds it: z, and dz on its way to dx and to a 16-bit dweight.
static std::atomic<int32_t> halves_forced{-1};  // by tests: 0 or 1

static bool multiplies_halves(Dtype dtype) {
  static const HalfProducts cpu = half_products();
  const int32_t forced = halves_forced;
  if (dtype == Dtype::f32) return false;
  return forced >= 0 ? forced : dtype == Dtype::f16 ? cpu.fp16 : cpu.bf16;
}

// A matrix, or a copy of it in another format or layout.
struct Widened {
  Widened borrowed() const { return {view, nullptr}; }

  Matrix view;
  std::unique_ptr<Tensor> memory;
};

static Widened contiguous(const Matrix& matrix, const Tensor& like) {
  if (matrix.is_contiguous()) return {matrix, nullptr};
  OwnMatrix copy(like, matrix.rows, matrix.columns, matrix.torch_dtype);
  copy.memory.copy_from(matrix.tensor());
  return {copy.view, std::make_unique<Tensor>(std::move(copy.memory))};
}

static Widened widen(const Matrix& matrix, const Tensor& like) {
  if (matrix.dtype == Dtype::f32) return {matrix, nullptr};
  if (matrix.column_stride != 1 && matrix.row_stride == 1) {
    Widened other = widen(matrix.transposed(), like);
    return {other.view.transposed(), std::move(other.memory)};
  }
  if (matrix.column_stride != 1) return widen(contiguous(matrix, like).view, like);
  OwnMatrix wide(like, matrix.rows, matrix.columns, aoti_torch_dtype_float32());
  const auto widen_span = MPK_BEST(widen_span);
  parallel_for(matrix.rows, matrix.columns, [&](int64_t row, int64_t last) {
    for (; row < last; ++row)
      widen_span(matrix.dtype, matrix.at(row), static_cast<float*>(wide.view.at(row)), matrix.columns);
  });
  return {wide.view, std::make_unique<Tensor>(std::move(wide.memory))};
}

static void narrow(const Matrix& wide, const Matrix& to) {
  const auto narrow_span = MPK_BEST(narrow_span);
  parallel_for(wide.rows, wide.columns, [&](int64_t first, int64_t last) {
    narrow_span(to.dtype, static_cast<const float*>(wide.at(first)), to.at(first), (last - first) * wide.columns);
  });
}

class ForwardOnCpu {
 public:
  explicit ForwardOnCpu(const StableIValue* stack)
      : it_(stack),
        x_(it_.x),
        weight_(it_.weight),
        y_(it_.x, it_.rows(), it_.outputs(), it_.x.dtype()),
        bias_(it_.bias ? contiguous(Matrix(*it_.bias), it_.x) : Widened{y_.view, nullptr}) {
    if (it_.saves_z()) saved_ = std::make_unique<OwnMatrix>(it_.x, it_.rows(), it_.outputs(), it_.x.dtype());
    multiplies_halves(it_.dtype) ? in_halves() : in_fp32();
  }

  void return_to(StableIValue* stack) {
    stack[0] = y_.memory.release();
    stack[1] = (saved_ ? std::move(saved_->memory) : nothing()).release();
  }

 private:
  // z has its bias already: it is rounded once.
  void in_halves() {
    const Matrix z = saved_ ? saved_->view : y_.view;
    if (it_.bias)
      multiply_add(z, x_, weight_.transposed(), bias_.view.repeated(z.rows));
    else
      multiply(z, x_, weight_.transposed());
    activate(z, 0, nullptr);
  }

  void in_fp32() {
    const Widened weight = widen(weight_, it_.x);
    const int64_t block = rows_in_block(y_.view.columns);
    std::unique_ptr<OwnMatrix> scratch;
    if (it_.dtype != Dtype::f32)
      scratch =
          std::make_unique<OwnMatrix>(it_.x, std::min(block, x_.rows), y_.view.columns, aoti_torch_dtype_float32());
    for (int64_t first = 0; first < x_.rows; first += block) {
      const int64_t rows = std::min(block, x_.rows - first);
      const Matrix z =
          scratch ? scratch->view.rows_from(0, rows) : (saved_ ? saved_->view : y_.view).rows_from(first, rows);
      multiply(z, widen(x_.rows_from(first, rows), it_.x).view, weight.view.transposed());
      activate(z, first, it_.bias ? bias_.view.data : nullptr);
    }
  }

  // Of rows from first on.
  void activate(const Matrix& z, int64_t first, const void* bias) const {
    const auto linear_act_rows = MPK_BEST(linear_act_rows);
    parallel_for(z.rows, z.columns, [&](int64_t begin, int64_t end) {
      void* const saved = saved_ ? saved_->view.at(first + begin) : nullptr;
      linear_act_rows({it_.activation, z.dtype, it_.dtype, z.at(begin), bias, y_.view.at(first + begin), saved},
                      end - begin, z.columns);
    });
  }

  Tensor nothing() const {
    const int64_t size = 0;
    return it_.x.new_empty(1, &size, it_.x.dtype());
  }

  LinearActArguments it_;
  Matrix x_, weight_;
  OwnMatrix y_;
  Widened bias_;
  std::unique_ptr<OwnMatrix> saved_;
};

static void linear_act_on_cpu(StableIValue* stack, uint64_t, uint64_t) { ForwardOnCpu(stack).return_to(stack); }
MPK_CPU_KERNEL(LinearActArguments::kOp, linear_act_on_cpu)

class BackwardOnCpu {
 public:
  explicit BackwardOnCpu(const StableIValue* stack)
      : it_(stack),
        fp32_(aoti_torch_dtype_float32()),
        halves_(multiplies_halves(it_.dtype)),
        dy_(contiguous(Matrix(it_.dy), it_.dy)),
        dx_(it_.new_dx()),
        dweight_(it_.new_dweight()),
        dbias_(it_.new_dbias()) {
    if (saves(it_.activation) != Saves::nothing) saved_ = contiguous(Matrix(it_.saved), it_.dy);
    const bool narrow_dweight = halves_ && it_.wants_dweight() && it_.weight_dtype == it_.dy.dtype();
    if (halves_ && (it_.wants_dx() || narrow_dweight))
      narrow_dz_ = new_matrix(it_.rows(), it_.outputs(), it_.dy.dtype());
    if (it_.wants_dbias()) sums_ = new_matrix(std::max<int64_t>(1, chunks_in(it_.rows())), it_.outputs(), fp32_);
    in_blocks(/*multiply_dx=*/it_.wants_dx() && !halves_, /*multiply_dweight=*/it_.wants_dweight() && !narrow_dweight);
    if (halves_ && it_.wants_dx()) multiply(Matrix(dx_), narrow_dz_->view, Matrix(*it_.weight));
    if (narrow_dweight) multiply(Matrix(dweight_), narrow_dz_->view.transposed(), Matrix(*it_.x));
    if (it_.wants_dbias()) add_up_sums();
  }

  void return_to(StableIValue* stack) {
    stack[0] = dx_.release();
    stack[1] = dweight_.release();
    stack[2] = dbias_.release();
  }

 private:
  // At least one block: without a row, dweight and dbias are 0.
  void in_blocks(bool multiply_dx, bool multiply_dweight) {
    const int64_t block = std::max<int64_t>(1, std::min(rows_in_block(it_.outputs()), it_.rows()));
    const Widened weight = multiply_dx ? widen(Matrix(*it_.weight), it_.dy) : dy_.borrowed();
    const auto wide_dz = multiply_dx || multiply_dweight ? new_matrix(block, it_.outputs(), fp32_) : nullptr;
    const auto wide_dx =
        multiply_dx && it_.dtype != Dtype::f32 ? new_matrix(block, weight.view.columns, fp32_) : nullptr;
    const auto wide_dweight =
        multiply_dweight && it_.weight_dtype != fp32_ ? new_matrix(it_.outputs(), it_.x->sizes()[1], fp32_) : nullptr;
    int64_t first = 0;
    do {
      const int64_t rows = std::min(block, it_.rows() - first);
      differentiate(wide_dz.get(), first, rows);
      if (multiply_dx) {
        const Matrix dx = Matrix(dx_).rows_from(first, rows);
        const Matrix wide = wide_dx ? wide_dx->view.rows_from(0, rows) : dx;
        multiply(wide, wide_dz->view.rows_from(0, rows), weight.view);
        if (wide_dx) narrow(wide, dx);
      }
      if (multiply_dweight) {
        const Widened x = widen(Matrix(*it_.x).rows_from(first, rows), it_.dy);
        const Matrix dweight = wide_dweight ? wide_dweight->view : Matrix(dweight_);
        const Matrix dz = wide_dz->view.rows_from(0, rows).transposed();
        first == 0 ? multiply(dweight, dz, x.view) : multiply_add(dweight, dz, x.view, dweight);
      }
      first += block;
    } while (first < it_.rows());
    if (wide_dweight) narrow(wide_dweight->view, Matrix(dweight_));
  }

  // dz of rows from first on, and its sums, as they are wanted.
  void differentiate(OwnMatrix* wide_dz, int64_t first, int64_t rows) const {
    if (!wide_dz && !narrow_dz_ && !sums_) return;
    const auto linear_act_backward_rows = MPK_BEST(linear_act_backward_rows);
    const int64_t columns = it_.outputs();
    parallel_for(std::max<int64_t>(1, chunks_in(rows)), kRowsOfSum * columns, [&](int64_t chunk, int64_t end) {
      for (; chunk < end; ++chunk) {
        const int64_t begin = chunk * kRowsOfSum, row = first + begin;
        linear_act_backward_rows({it_.activation, it_.dtype, dy_.view.at(row), saved_.view.at(row),
                                  wide_dz ? static_cast<float*>(wide_dz->view.at(begin)) : nullptr,
                                  narrow_dz_ ? narrow_dz_->view.at(row) : nullptr,
                                  sums_ ? static_cast<float*>(sums_->view.at(row / kRowsOfSum)) : nullptr},
                                 std::min(kRowsOfSum, rows - begin), columns);
      }
    });
  }

  void add_up_sums() const {
    const auto narrow_span = MPK_BEST(narrow_span);
    Dtype dtype;
    find_dtype(it_.bias_dtype, &dtype);
    parallel_for(it_.outputs(), sums_->view.rows, [&](int64_t first, int64_t last) {
      for (int64_t column = first; column < last; ++column) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < sums_->view.rows; ++chunk)
          sum += static_cast<float*>(sums_->view.at(chunk))[column];
        const float rounded = static_cast<float>(sum);
        narrow_span(dtype, &rounded, static_cast<char*>(dbias_.data()) + column * width_of(dtype), 1);
      }
    });
  }

  static int64_t chunks_in(int64_t rows) { return (rows + kRowsOfSum - 1) / kRowsOfSum; }
  std::unique_ptr<OwnMatrix> new_matrix(int64_t rows, int64_t columns, int32_t torch_dtype) const {
    return std::make_unique<OwnMatrix>(it_.dy, rows, columns, torch_dtype);
  }

  LinearActBackwardArguments it_;
  int32_t fp32_;
  bool halves_;
  Widened dy_, saved_ = dy_.borrowed();
  Tensor dx_, dweight_, dbias_;
  std::unique_ptr<OwnMatrix> narrow_dz_, sums_;
};

static void linear_act_backward_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  BackwardOnCpu(stack).return_to(stack);
}
MPK_CPU_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cpu)

}  // namespace mpk

// For tests, of the path that this machine would not take: 1 and 0 as if it multiplied 16-bit matrices fast or slowly,
// -1 as it is.
extern "C" __attribute__((visibility("default"))) void mpkernels_force_half_products(int32_t choice) {
  mpk::halves_forced = choice;
}
