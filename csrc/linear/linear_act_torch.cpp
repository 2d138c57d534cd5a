#include "linear/linear_act_cpu_torch.h"

namespace mpk {

class ForwardOnCpu {
 public:
  explicit ForwardOnCpu(const StableIValue* stack)
      : it_(stack),
        y_result_(it_.new_output()),
        saved_result_(it_.saves_z() ? it_.new_output() : it_.new_nothing()),
        x_(it_.x),
        weight_(it_.weight),
        y_(y_result_),
        saved_(saved_result_),
        bias_(contiguous(it_.bias ? Matrix(*it_.bias) : y_)) {
    multiplies_halves(it_.dtype) ? in_halves() : in_fp32();
  }

  void return_to(StableIValue* stack) {
    stack[0] = y_result_.release();
    stack[1] = saved_result_.release();
  }

 private:
  const Matrix& rounded_z() const { return it_.saves_z() ? saved_ : y_; }

  // z has its bias already: it is rounded once.
  void in_halves() {
    if (it_.bias)
      multiply_add(rounded_z(), x_, weight_.transposed(), bias_.view.repeated(x_.rows));
    else
      multiply(rounded_z(), x_, weight_.transposed());
    if (it_.activation != Activation::none) activate(rounded_z(), 0, nullptr);
  }

  void in_fp32() {
    const Widened weight = widen(weight_);
    const int64_t block = std::min(rows_in_block(y_.columns), x_.rows);
    const bool is_wide = it_.dtype == Dtype::f32;
    const ScratchMatrix scratch(is_wide ? 0 : block, y_.columns, aoti_torch_dtype_float32());
    for (int64_t first = 0; first < x_.rows; first += block) {
      const int64_t rows = std::min(block, x_.rows - first);
      const Matrix z = is_wide ? rounded_z().rows_from(first, rows) : scratch.view.rows_from(0, rows);
      multiply(z, widen(x_.rows_from(first, rows)).view, weight.view.transposed());
      activate(z, first, it_.bias ? bias_.view.data : nullptr);
    }
  }

  // The rows from first on.
  void activate(const Matrix& z, int64_t first, const void* bias) const {
    const auto linear_act_rows = MPK_BEST(linear_act_rows);
    parallel_for(z.rows, z.columns, [&](int64_t begin, int64_t end) {
      const int64_t row = first + begin;
      linear_act_rows(
          {it_.activation, z.dtype, it_.dtype, z.at(begin), bias, y_.at(row), it_.saves_z() ? saved_.at(row) : nullptr},
          end - begin, z.columns);
    });
  }

  const LinearActArguments it_;
  Tensor y_result_, saved_result_;
  const Matrix x_, weight_, y_, saved_;
  const Widened bias_;
};

static void linear_act_on_cpu(StableIValue* stack, uint64_t, uint64_t) { ForwardOnCpu(stack).return_to(stack); }
MPK_CPU_KERNEL(LinearActArguments::kOp, linear_act_on_cpu)

class BackwardOnCpu {
 public:
  explicit BackwardOnCpu(const StableIValue* stack)
      : it_(stack),
        dx_result_(it_.new_dx()),
        dweight_result_(it_.new_dweight()),
        dbias_result_(it_.new_dbias()),
        dx_(dx_result_),
        dweight_(dweight_result_),
        in_halves_(multiplies_halves(it_.dtype)),
        is_dz_dy_(saves(it_.activation) == Saves::nothing && (in_halves_ || it_.dtype == Dtype::f32)),
        rounds_dz_(in_halves_ && !is_dz_dy_ && (it_.wants_dx() || it_.wants_dweight())),
        dy_(is_dz_dy_ && !it_.wants_dbias() ? Widened{Matrix(it_.dy), nullptr} : contiguous(Matrix(it_.dy))),
        saved_(saves(it_.activation) == Saves::nothing ? dy_.borrowed() : contiguous(Matrix(it_.saved))),
        rounded_dz_(rounds_dz_ ? it_.rows() : 0, it_.outputs(), it_.dy.dtype()),
        pass_(it_.activation, it_.dtype, it_.rows(), it_.outputs(), it_.wants_dbias()) {
    const bool at_once = in_halves_ || is_dz_dy_;
    in_fp32(/*multiply_dx=*/it_.wants_dx() && !at_once, /*multiply_dweight=*/it_.wants_dweight() && !at_once);
    const Matrix dz = is_dz_dy_ ? Matrix(it_.dy) : rounded_dz_.view;
    if (at_once && it_.wants_dx()) multiply(dx_, dz, Matrix(*it_.weight));
    if (at_once && it_.wants_dweight()) multiply_dweight(dz.transposed(), Matrix(*it_.x));
    if (it_.wants_dbias()) pass_.add_up(Matrix(dbias_result_));
  }

  void return_to(StableIValue* stack) {
    stack[0] = dx_result_.release();
    stack[1] = dweight_result_.release();
    stack[2] = dbias_result_.release();
  }

 private:
  static int32_t fp32() { return aoti_torch_dtype_float32(); }
  bool has_narrow_dweight() const { return it_.wants_dweight() && it_.weight_dtype != fp32(); }

  // At least one block: without a row, dweight and dbias are 0.
  void in_fp32(bool multiply_dx, bool multiply_dweight) const {
    const int64_t block = std::max<int64_t>(1, std::min(rows_in_block(it_.outputs()), it_.rows()));
    const Widened weight = multiply_dx ? widen(Matrix(*it_.weight)) : dy_.borrowed();
    const bool wants_dz = multiply_dx || multiply_dweight, narrow_dx = multiply_dx && it_.dtype != Dtype::f32;
    const bool narrow_dweight = multiply_dweight && has_narrow_dweight();
    const ScratchMatrix wide_dz(wants_dz ? block : 0, it_.outputs(), fp32());
    const ScratchMatrix wide_dx(narrow_dx ? block : 0, dx_.columns, fp32());
    const ScratchMatrix wide_dweight(narrow_dweight ? dweight_.rows : 0, dweight_.columns, fp32());
    const Matrix& dweight = narrow_dweight ? wide_dweight.view : dweight_;
    int64_t first = 0;
    do {
      const int64_t rows = std::min(block, it_.rows() - first);
      const Matrix dz = wide_dz.view.rows_from(0, rows);
      differentiate(first, rows, wants_dz ? &dz : nullptr);
      if (multiply_dx) {
        const Matrix to = dx_.rows_from(first, rows), dx = narrow_dx ? wide_dx.view.rows_from(0, rows) : to;
        multiply(dx, dz, weight.view);
        if (narrow_dx) narrow(dx, to);
      }
      if (multiply_dweight) {
        const Widened x = widen(Matrix(*it_.x).rows_from(first, rows));
        first == 0 ? multiply(dweight, dz.transposed(), x.view)
                   : multiply_add(dweight, dz.transposed(), x.view, dweight);
      }
      first += block;
    } while (first < it_.rows());
    if (narrow_dweight) narrow(wide_dweight.view, dweight_);
  }

  // In halves, an fp32 product is the sum of two that are rounded.
  void multiply_dweight(const Matrix& dz, const Matrix& x) const {
    if (!in_halves_ || has_narrow_dweight()) return multiply(dweight_, dz, x);
    const ScratchMatrix high(dweight_.rows, dweight_.columns, x.torch_dtype),
        low(dweight_.rows, dweight_.columns, x.torch_dtype);
    multiply(high.view, dz, x);
    multiply_add(low.view, dz, x, high.view, -1);
    const auto add_span = MPK_BEST(add_span);
    parallel_for(dweight_.rows, dweight_.columns, [&](int64_t first, int64_t last) {
      add_span(x.dtype, high.view.at(first), low.view.at(first), static_cast<float*>(dweight_.at(first)),
               (last - first) * dweight_.columns);
    });
  }

  // dz of the rows from first on, in each format that is wanted, and the sums of its columns.
  void differentiate(int64_t first, int64_t rows, const Matrix* wide_dz) const {
    if (!wide_dz && !rounds_dz_ && !it_.wants_dbias()) return;
    const Matrix dy = dy_.view.rows_from(first, rows);
    const Matrix rounded_dz = rounds_dz_ ? rounded_dz_.view.rows_from(first, rows) : dy;
    pass_.run(first, dy, saved_.view.rows_from(first, rows), wide_dz, rounds_dz_ ? &rounded_dz : nullptr,
              /*y=*/nullptr);
  }

  const LinearActBackwardArguments it_;
  Tensor dx_result_, dweight_result_, dbias_result_;
  const Matrix dx_, dweight_;
  const bool in_halves_, is_dz_dy_, rounds_dz_;
  const Widened dy_, saved_;
  const ScratchMatrix rounded_dz_;
  const BackwardPass pass_;
};

static void linear_act_backward_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  BackwardOnCpu(stack).return_to(stack);
}
MPK_CPU_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cpu)

}  // namespace mpk

// For tests, of the way that this machine does not go: 1 and 0 as if it multiplied 16-bit matrices fast or slowly, -1
// as it is.
extern "C" __attribute__((visibility("default"))) void mpkernels_force_half_products(int32_t choice) {
  mpk::halves_forced = choice;
}
