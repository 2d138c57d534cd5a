#include "linear/linear_dact_torch.h"

#include "linear/linear_act_cpu_torch.h"

namespace mpk {

class DactOnCpu {
 public:
  explicit DactOnCpu(const StableIValue* stack)
      : it_(stack),
        dz_result_(it_.new_dz()),
        dbias_result_(it_.new_dbias()),
        h_result_(it_.new_h()),
        dz_(dz_result_),
        h_(h_result_),
        saved_(saves(it_.activation) == Saves::nothing ? Widened{dz_, nullptr} : contiguous(Matrix(it_.saved))),
        pass_(it_.activation, it_.dtype, dz_.rows, dz_.columns, it_.wants_dbias()) {
    multiplies_halves(it_.dtype) ? in_halves() : in_fp32();
    if (it_.wants_dbias()) pass_.add_up(Matrix(dbias_result_));
  }

  void return_to(StableIValue* stack) {
    stack[0] = dz_result_.release();
    stack[1] = dbias_result_.release();
    stack[2] = h_result_.release();
  }

 private:
  // The product is rounded as torch rounds it, and dz once more.
  void in_halves() const {
    multiply(dz_, Matrix(it_.dy), Matrix(it_.weight));
    pass_.run(0, dz_, saved_.view, nullptr, &dz_, it_.wants_h ? &h_ : nullptr);
  }

  // At least one block: without a row, dbias is 0.
  void in_fp32() const {
    const Matrix dy(it_.dy);
    const Widened weight = widen(Matrix(it_.weight));
    const int64_t block = std::max<int64_t>(1, std::min(rows_in_block(dz_.columns), dz_.rows));
    const bool is_wide = it_.dtype == Dtype::f32;
    const ScratchMatrix scratch(is_wide ? 0 : block, dz_.columns, aoti_torch_dtype_float32());
    int64_t first = 0;
    do {
      const int64_t rows = std::min(block, dz_.rows - first);
      const Matrix dz = dz_.rows_from(first, rows), product = is_wide ? dz : scratch.view.rows_from(0, rows),
                   h = it_.wants_h ? h_.rows_from(first, rows) : h_;
      multiply(product, widen(dy.rows_from(first, rows)).view, weight.view);
      pass_.run(first, product, saved_.view.rows_from(first, rows), nullptr, &dz, it_.wants_h ? &h : nullptr);
      first += block;
    } while (first < dz_.rows);
  }

  const LinearDactArguments it_;
  Tensor dz_result_, dbias_result_, h_result_;
  const Matrix dz_, h_;
  const Widened saved_;
  const BackwardPass pass_;
};

static void linear_dact_on_cpu(StableIValue* stack, uint64_t, uint64_t) { DactOnCpu(stack).return_to(stack); }
MPK_CPU_KERNEL(LinearDactArguments::kOp, linear_dact_on_cpu)

}  // namespace mpk
