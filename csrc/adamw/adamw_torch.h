// What parameters are stepped with, but for their grads: owned from step to step, and looked at anew in each, for any
// of it may have been moved, resized or given other strides meanwhile.
#pragma once

#include "adamw/adamw.h"
#include "common/torch.h"

namespace mpk {

class AdamwOnDevice;

class AdamwPlan {
 public:
  static constexpr const char* kOp = "adamw_";

  AdamwPlan(StableIValue exp_avgs, StableIValue exp_avg_sqs, StableIValue max_exp_avg_sqs, StableIValue masters,
            StableIValue scales, StableIValue steps, StableIValue group_sizes)
      : exp_avgs_(exp_avgs),
        exp_avg_sqs_(exp_avg_sqs),
        max_exp_avg_sqs_(max_exp_avg_sqs),
        masters_(masters),
        scales_(scales),
        steps_(steps),
        rows_(steps_.count()),
        before_(steps_.count()) {
    size_t row = 0;
    for (const int64_t size : take_numbers<int64_t>(group_sizes)) {
      for (const size_t end = row + size; row < end; ++row) {
        require(row < rows_.size(), kOp, "group_sizes do not go with steps");
        rows_[row].group = groups_;
      }
      ++groups_;
    }
    require(row == rows_.size(), kOp, "group_sizes do not go with steps");
  }

  const Tensor& like() const { return steps_.front(); }
  int32_t count() const { return steps_.count(); }

  std::vector<AdamwRow>& rows() { return rows_; }  // once they are filled

  // What the device keeps of the rows as they are now, or null.
  std::shared_ptr<AdamwOnDevice> on_device;

  // Checks everything before anything is written. What a row can't have in place it borrows.
  void fill_rows(const TensorList& params, const TensorList& grads, size_t groups, Lender& lender) {
    require(groups == groups_, kOp, "group_sizes do not go with the hyperparameters");
    require(params.count() == count() && grads.count() == count(), kOp, "params, grads and steps are not equally long");
    const auto device = like().device();
    for (int32_t i = 0; i < count(); ++i) {
      if (before_[i].was_plain && grads[i].device() == device && is_as_before(i, params[i], grads[i])) {
        rows_[i].grad = grads[i].const_data();
        continue;
      }
      // Its master would not be its own.
      require(!before_[i].is_known || params[i].dtype() == before_[i].param_dtype, kOp,
              "params[" + std::to_string(i) + "] has changed its dtype since its state was made");
      before_[i] = {};
      AdamwRow row{};
      row.group = rows_[i].group;
      row.first_chunk = rows_[i].first_chunk;
      fill(row, i, params[i], grads[i], lender);
      if (!are_alike(row, rows_[i])) on_device = nullptr;
      rows_[i] = row;
    }
  }

  // Of each row. In a group most rows have come to the same step, and powers take a while.
  std::vector<AdamwScalars<double>> scalars(const std::vector<AdamwGroup>& groups, const AdamwShared& shared) const {
    std::vector<AdamwScalars<double>> all;
    all.reserve(rows_.size());
    const AdamwRow* last = nullptr;
    for (const AdamwRow& row : rows_) {
      const bool is_like_last = last && row.group == last->group && *row.step == *last->step;
      all.push_back(is_like_last ? all.back() : adamw_scalars<double>(groups[row.group], *row.step, shared));
      last = &row;
    }
    return all;
  }

 private:
  // If all that a row was made of was contiguous, it is soon told whether it still holds. To fill a row takes several
  // times as long.
  struct Before {
    bool is_known, was_plain;
    int32_t param_dtype, grad_dtype, state_dtype, master_dtype;
  };

  // But for their grads.
  static bool are_alike(AdamwRow a, AdamwRow b) {
    a.grad = b.grad = nullptr;
    return memcmp(&a, &b, sizeof(AdamwRow)) == 0;
  }

  // But for its grad's device. All else lies where it did, on the same device therefore.
  bool is_as_before(int32_t i, const Tensor& param, const Tensor& grad) const {
    const AdamwRow& row = rows_[i];
    const Before& before = before_[i];
    const auto is_at = [&](const Tensor& tensor, const void* address, int32_t dtype) {
      // data(): a lazy clone that shares the memory gets its own now.
      return tensor.data() == address && tensor.size() == row.size && tensor.is_contiguous() && tensor.dtype() == dtype;
    };
    const auto is_state_at = [&](const TensorList& list, const void* address, int32_t dtype) {
      return !address || is_at(list[i], address, dtype);
    };
    return is_at(param, row.param, before.param_dtype) && grad.is_contiguous() && grad.dtype() == before.grad_dtype &&
           have_same_shape(grad, param) && is_state_at(exp_avgs_, row.exp_avg, before.state_dtype) &&
           is_state_at(exp_avg_sqs_, row.exp_avg_sq, before.state_dtype) &&
           is_state_at(max_exp_avg_sqs_, row.max_exp_avg_sq, before.state_dtype) &&
           is_state_at(masters_, row.master, before.master_dtype) && (!row.scales || scales_[i].data() == row.scales) &&
           steps_[i].data() == row.step;
  }

  // Entry i of a list that goes along with the parameters; null where the list or the entry is empty.
  const Tensor* entry(const TensorList& list, int32_t i, const Tensor& param, const char* name) const {
    if (list.count() == 0) return nullptr;
    require(i < list.count(), kOp, std::string(name) + " is shorter than params");
    const Tensor& tensor = list[i];
    if (tensor.size() == 0) return nullptr;
    check_like(param, tensor, i, name);
    return &tensor;
  }

  static void check_like(const Tensor& param, const Tensor& tensor, int32_t i, const char* name) {
    if (!tensor.is_strided() || tensor.device() != param.device() || !have_same_shape(tensor, param)) {
      require(false, kOp,
              std::string(name) + "[" + std::to_string(i) + "] is not dense, elsewhere or of another shape");
    }
  }

  const Tensor* scales(int32_t i) const {
    if (scales_.count() == 0) return nullptr;
    require(i < scales_.count(), kOp, "scales is shorter than params");
    return scales_[i].size() == 0 ? nullptr : &scales_[i];
  }

  void fill(AdamwRow& row, int32_t i, const Tensor& param, const Tensor& grad, Lender& lender) {
    row.size = param.size();
    require(steps_[i].is_fp32_scalar() && steps_[i].device() == param.device(), kOp,
            "steps[" + std::to_string(i) + "] is not a single fp32 on the parameters' device");
    row.step = steps_[i].data<float>();
    if (row.size == 0) return;
    check_like(param, param, i, "params");
    check_like(param, grad, i, "grads");
    const Tensor* const exp_avg = entry(exp_avgs_, i, param, "exp_avgs");
    const Tensor* const exp_avg_sq = entry(exp_avg_sqs_, i, param, "exp_avg_sqs");
    const Tensor* const largest = entry(max_exp_avg_sqs_, i, param, "max_exp_avg_sqs");
    const Tensor* const master = entry(masters_, i, param, "masters");
    const Tensor* const scales = this->scales(i);
    const bool same = exp_avg && exp_avg_sq && exp_avg_sq->dtype() == exp_avg->dtype() &&
                      (!largest || largest->dtype() == exp_avg->dtype());
    const bool known =
        same && find_dtype(param.dtype(), &row.param_dtype) && find_dtype(grad.dtype(), &row.grad_dtype) &&
        (scales ? exp_avg->dtype() == aoti_torch_dtype_int8() : find_dtype(exp_avg->dtype(), &row.state_dtype));
    const bool wide = row.param_dtype == Dtype::f64;
    require(known && wide == (row.grad_dtype == Dtype::f64) && wide == (row.state_dtype == Dtype::f64) &&
                row.state_dtype != Dtype::f16,
            kOp, "dtypes of params, grads and states at " + std::to_string(i) + " do not go together");
    if (master) row.master_kind = master->dtype() == aoti_torch_dtype_int16() ? Master::split : Master::fp32;
    const bool narrow = row.param_dtype == Dtype::f16 || row.param_dtype == Dtype::b16;
    require(!master || (narrow && (row.master_kind == Master::split || master->dtype() == aoti_torch_dtype_float32())),
            kOp, "masters[" + std::to_string(i) + "] goes with a 16-bit parameter only, in int16 or fp32");

    // Codes stay in the order that they have: each block of it shares a scale.
    const Tensor& like = scales ? *exp_avg : param;
    row.param = lender.lend(param, like, true);
    row.grad = lender.lend(grad, like, false);
    row.exp_avg = lender.lend(*exp_avg, like, true);
    row.exp_avg_sq = lender.lend(*exp_avg_sq, like, true);
    row.max_exp_avg_sq = largest ? lender.lend(*largest, like, true) : nullptr;
    row.master = master ? lender.lend(*master, like, true) : nullptr;
    if (scales) {
      const int64_t blocks = (row.size + kQuantized - 1) / kQuantized;
      require(scales->dtype() == aoti_torch_dtype_float32() && scales->is_contiguous() && exp_avg->is_dense() &&
                  have_same_layout(*exp_avg_sq, *exp_avg) && (!largest || have_same_layout(*largest, *exp_avg)) &&
                  scales->device() == param.device() && scales->size() >= blocks * (largest ? 3 : 2),
              kOp, "scales[" + std::to_string(i) + "] does not go with its moments");
      row.scales = scales->data<float>();
    }
    bool is_plain = param.is_contiguous() && grad.is_contiguous();
    for (const Tensor* each : {exp_avg, exp_avg_sq, largest, master}) is_plain &= !each || each->is_contiguous();
    before_[i] = {true, is_plain, param.dtype(), grad.dtype(), exp_avg->dtype(), master ? master->dtype() : 0};
  }

  const TensorList exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_, masters_, scales_, steps_;
  size_t groups_ = 0;
  std::vector<AdamwRow> rows_;
  std::vector<Before> before_;
};

}  // namespace mpk
