#include "linear/linear_gated_torch.h"

#include "linear/linear_act_cpu_torch.h"

namespace mpk {

class GatedOnCpu {
 public:
  explicit GatedOnCpu(const StableIValue* stack)
      : it_(stack),
        in_halves_(multiplies_halves(it_.dtype)),
        h_result_(it_.new_h()),
        z_result_(it_.new_z(/*wanted=*/it_.save || in_halves_)),
        x_(it_.x),
        gate_weight_(it_.gate_weight),
        up_weight_(it_.up_weight),
        h_(h_result_),
        z_(z_result_),
        gate_bias_(contiguous(it_.gate_bias ? Matrix(*it_.gate_bias) : h_)),
        up_bias_(contiguous(it_.up_bias ? Matrix(*it_.up_bias) : h_)) {
    in_halves_ ? in_halves() : in_fp32();
  }

  void return_to(StableIValue* stack) {
    stack[0] = h_result_.release();
    stack[1] = it_.save ? z_result_.release() : it_.new_z(/*wanted=*/false).release();
  }

 private:
  // z has its biases already: it is rounded once.
  void in_halves() const {
    if (!it_.gate_bias && !it_.up_bias) {
      multiply_both(z_, x_, gate_weight_, up_weight_);
    } else {
      multiply_and_shift(columns_from(z_, 0, h_.columns), gate_weight_, it_.gate_bias ? &gate_bias_ : nullptr);
      multiply_and_shift(columns_from(z_, h_.columns, h_.columns), up_weight_, it_.up_bias ? &up_bias_ : nullptr);
    }
    close(z_, 0, nullptr, nullptr, /*saved=*/nullptr);
  }

  void multiply_and_shift(const Matrix& z, const Matrix& weight, const Widened* bias) const {
    if (bias)
      multiply_add(z, x_, weight.transposed(), bias->view.repeated(x_.rows));
    else
      multiply(z, x_, weight.transposed());
  }

  static void multiply_both(const Matrix& z, const Matrix& x, const Matrix& gate_weight, const Matrix& up_weight) {
    if (const auto weight = joined(gate_weight, up_weight)) return multiply(z, x, weight->transposed());
    const int64_t columns = gate_weight.rows;
    multiply(columns_from(z, 0, columns), x, gate_weight.transposed());
    multiply(columns_from(z, columns, columns), x, up_weight.transposed());
  }

  void in_fp32() const {
    const auto both = joined(gate_weight_, up_weight_);
    const Widened gate_weight = widen(both ? *both : gate_weight_),
                  up_weight = both ? gate_weight.borrowed() : widen(up_weight_);
    const int64_t columns = 2 * h_.columns, block = std::min(rows_in_block(columns), x_.rows);
    const bool in_place = it_.dtype == Dtype::f32 && it_.save;
    const ScratchMatrix scratch(in_place ? 0 : block, columns, aoti_torch_dtype_float32());
    for (int64_t first = 0; first < x_.rows; first += block) {
      const int64_t rows = std::min(block, x_.rows - first);
      const Matrix z = in_place ? z_.rows_from(first, rows) : scratch.view.rows_from(0, rows);
      const Widened x = widen(x_.rows_from(first, rows));
      if (both)
        multiply(z, x.view, gate_weight.view.transposed());
      else
        multiply_both(z, x.view, gate_weight.view, up_weight.view);
      close(z, first, it_.gate_bias ? gate_bias_.view.data : nullptr, it_.up_bias ? up_bias_.view.data : nullptr,
            it_.save ? &z_ : nullptr);
    }
  }

  // h of z, which holds the rows from first on.
  void close(const Matrix& z, int64_t first, const void* gate_bias, const void* up_bias, const Matrix* saved) const {
    const auto linear_gated_rows = MPK_BEST(linear_gated_rows);
    parallel_for(z.rows, z.columns, [&](int64_t begin, int64_t end) {
      const int64_t row = first + begin;
      linear_gated_rows({it_.activation, z.dtype, it_.dtype, z.at(begin), gate_bias, up_bias, h_.at(row),
                         saved ? saved->at(row) : nullptr},
                        end - begin, h_.columns);
    });
  }

  const LinearGatedArguments it_;
  const bool in_halves_;
  Tensor h_result_, z_result_;
  const Matrix x_, gate_weight_, up_weight_, h_, z_;
  const Widened gate_bias_, up_bias_;
};

static void linear_gated_on_cpu(StableIValue* stack, uint64_t, uint64_t) { GatedOnCpu(stack).return_to(stack); }
MPK_CPU_KERNEL(LinearGatedArguments::kOp, linear_gated_on_cpu)

class DgatedOnCpu {
 public:
  explicit DgatedOnCpu(const StableIValue* stack)
      : it_(stack),
        dz_result_(it_.new_dz()),
        h_result_(it_.new_h()),
        dz_(dz_result_),
        h_(h_result_),
        z_(contiguous(Matrix(it_.z))) {
    if (it_.weight)
      multiplies_halves(it_.dtype) ? in_halves() : in_fp32();
    else
      differentiate(contiguous(Matrix(it_.dy)).view, 0);
  }

  void return_to(StableIValue* stack) {
    stack[0] = dz_result_.release();
    stack[1] = h_result_.release();
  }

 private:
  // The product is rounded as torch rounds it.
  void in_halves() const {
    const ScratchMatrix dh(it_.rows(), it_.columns(), it_.z.dtype());
    multiply(dh.view, Matrix(it_.dy), Matrix(*it_.weight));
    differentiate(dh.view, 0);
  }

  void in_fp32() const {
    const Matrix dy(it_.dy);
    const Widened weight = widen(Matrix(*it_.weight));
    const int64_t block = std::min(rows_in_block(it_.columns()), it_.rows());
    const ScratchMatrix dh(block, it_.columns(), aoti_torch_dtype_float32());
    for (int64_t first = 0; first < it_.rows(); first += block) {
      const int64_t rows = std::min(block, it_.rows() - first);
      const Matrix part = dh.view.rows_from(0, rows);
      multiply(part, widen(dy.rows_from(first, rows)).view, weight.view);
      differentiate(part, first);
    }
  }

  // dz, and h, of dh, which holds the rows from first on.
  void differentiate(const Matrix& dh, int64_t first) const {
    const auto linear_dgated_rows = MPK_BEST(linear_dgated_rows);
    parallel_for(dh.rows, dz_.columns, [&](int64_t begin, int64_t end) {
      const int64_t row = first + begin;
      linear_dgated_rows({it_.activation, dh.dtype, it_.dtype, dh.at(begin), z_.view.at(row), dz_.at(row),
                          it_.wants_h ? h_.at(row) : nullptr},
                         end - begin, dh.columns);
    });
  }

  const LinearDgatedArguments it_;
  Tensor dz_result_, h_result_;
  const Matrix dz_, h_;
  const Widened z_;
};

static void linear_dgated_on_cpu(StableIValue* stack, uint64_t, uint64_t) { DgatedOnCpu(stack).return_to(stack); }
MPK_CPU_KERNEL(LinearDgatedArguments::kOp, linear_dgated_on_cpu)

}  // namespace mpk
