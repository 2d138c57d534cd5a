// The tensors of a step, without the grads. A plan owns them across steps and checks each time whether one was moved,
// resized or restrided.
#pragma once

#include "step/arguments_torch.h"

namespace mpk {

template <class Rule>
class PlanOnDevice;

template <class Rule>
class StepPlan {
 public:
  explicit StepPlan(Arguments& arguments)
      : states_(arguments.lists(Rule::kStates)),
        masters_(arguments.tensors()),
        scales_(arguments.tensors()),
        steps_(arguments.tensors()),
        group_sizes_(arguments.numbers<int64_t>()),
        rows_(steps_.count()),
        checked_(steps_.count()) {
    int64_t group = 0;
    size_t row = 0;
    for (const int64_t size : group_sizes_) {
      for (const size_t end = row + size; row < end; ++row) {
        require(row < rows_.size(), Rule::kOp, "group_sizes do not go with steps");
        rows_[row].group = group;
      }
      ++group;
    }
    require(row == rows_.size(), Rule::kOp, "group_sizes do not go with steps");
  }

  const Tensor& like() const { return steps_.front(); }
  int32_t count() const { return steps_.count(); }

  std::vector<StepRow>& rows() { return rows_; }  // valid after fill_rows()

  // What the device keeps of the rows as they are now, or null.
  std::shared_ptr<PlanOnDevice<Rule>> on_device;

  // Checks everything before anything is written. A tensor that can't be used in place is copied by the lender.
  void fill_rows(const WeightArguments& weights, size_t groups, Lender& lender) {
    const TensorList &params = weights.params, &grads = weights.grads;
    require(groups == group_sizes_.size(), Rule::kOp, "group_sizes do not go with the hyperparameters");
    require(params.count() == count() && grads.count() == count(), Rule::kOp,
            "params, grads and steps are not equally long");
    const auto device = like().device();
    for (int32_t i = 0; i < count(); ++i) {
      if (checked_[i].is_contiguous && grads[i].device() == device && is_as_checked(i, params[i], grads[i])) {
        rows_[i].grad = grads[i].const_data();
        continue;
      }
      require(!checked_[i].is_known || params[i].dtype() == checked_[i].param_dtype, Rule::kOp,
              at("params", i) + " has changed its dtype since its state was made");
      checked_[i] = {};
      StepRow row{};
      row.group = rows_[i].group;
      row.first_chunk = rows_[i].first_chunk;
      fill(row, i, params[i], grads[i], lender);
      if (!are_alike(row, rows_[i])) on_device = nullptr;
      rows_[i] = row;
    }
  }

  // Returns one entry per row. pow is slow, so neighbours share the result while group and step are the same.
  std::vector<StepScalars<Rule, double>> scalars(const std::vector<StepGroup<Rule>>& groups,
                                                 const StepShared& shared) const {
    std::vector<StepScalars<Rule, double>> all;
    all.reserve(rows_.size());
    const StepRow* last = nullptr;
    for (const StepRow& row : rows_) {
      const bool is_like_last = last && row.group == last->group && *row.step == *last->step;
      all.push_back(is_like_last ? all.back() : step_scalars(groups[row.group], *row.step, shared));
      last = &row;
    }
    return all;
  }

 private:
  // What was found when a row was last checked in full. While its tensors are contiguous, comparing them with this
  // takes a fraction of the time of another full check.
  struct Checked {
    bool is_known, is_contiguous;
    int32_t param_dtype, grad_dtype, state_dtype, master_dtype;
  };

  // A row's tensors beside its parameter and grad; null where there is none.
  struct RowTensors {
    const Tensor* states[Rule::kStates];
    const Tensor *master, *scales;
  };

  static std::string at(const char* name, int32_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

  // Whether two rows are the same, apart from their grads.
  static bool are_alike(StepRow a, StepRow b) {
    a.grad = b.grad = nullptr;
    return memcmp(&a, &b, sizeof(StepRow)) == 0;
  }

  // Whether row i's tensors have the same addresses, sizes, layouts and dtypes as before. The grad's memory may be new;
  // fill_rows has checked its device. The other tensors' addresses tell their devices.
  bool is_as_checked(int32_t i, const Tensor& param, const Tensor& grad) const {
    const StepRow& row = rows_[i];
    const Checked& checked = checked_[i];
    const auto is_at = [&](const Tensor& tensor, const void* address, int32_t dtype) {
      // data(), so that a lazy clone that shares the memory gets its own now.
      return tensor.data() == address && tensor.size() == row.size && tensor.is_contiguous() && tensor.dtype() == dtype;
    };
    const auto is_entry_at = [&](const TensorList& list, const void* address, int32_t dtype) {
      return !address || is_at(list[i], address, dtype);
    };
    bool is_same = is_at(param, row.param, checked.param_dtype) && grad.is_contiguous() &&
                   grad.dtype() == checked.grad_dtype && have_same_shape(grad, param);
    for (int state = 0; state < Rule::kStates; ++state)
      is_same = is_same && is_entry_at(states_[state], row.states[state], checked.state_dtype);
    return is_same && is_entry_at(masters_, row.master, checked.master_dtype) &&
           (!row.scales || scales_[i].data() == row.scales) && steps_[i].data() == row.step;
  }

  // Returns entry i of a list that goes along with the parameters; null if the list or the entry is empty.
  static const Tensor* entry(const TensorList& list, int32_t i, const char* name) {
    if (list.count() == 0) return nullptr;
    require(i < list.count(), Rule::kOp, std::string(name) + " is shorter than params");
    return list[i].size() == 0 ? nullptr : &list[i];
  }

  static void check_like(const Tensor& param, const Tensor* tensor, int32_t i, const char* name) {
    if (!tensor || (tensor->is_strided() && tensor->device() == param.device() && have_same_shape(*tensor, param)))
      return;
    require(false, Rule::kOp, at(name, i) + " is not dense, elsewhere or of another shape");
  }

  RowTensors tensors_of(int32_t i, const Tensor& param) const {
    RowTensors found{};
    for (int state = 0; state < Rule::kStates; ++state) {
      found.states[state] = entry(states_[state], i, Rule::kLists[state]);
      check_like(param, found.states[state], i, Rule::kLists[state]);
    }
    found.master = entry(masters_, i, "masters");
    check_like(param, found.master, i, "masters");
    found.scales = entry(scales_, i, "scales");
    require(!found.scales || found.states[0], Rule::kOp, at("scales", i) + " does not go with its states");
    return found;
  }

  void fill(StepRow& row, int32_t i, const Tensor& param, const Tensor& grad, Lender& lender) {
    const Tensor& step = steps_[i];
    row.size = param.size();
    require(step.is_fp32_scalar() && step.device() == param.device(), Rule::kOp,
            at("steps", i) + " is not a single fp32 on the parameters' device");
    row.step = step.data<float>();
    if (row.size == 0) return;
    check_like(param, &param, i, "params");
    check_like(param, &grad, i, "grads");
    const RowTensors found = tensors_of(i, param);
    fill_dtypes(row, i, param, grad, found);
    // Codes stay in their order of memory, because each block of adjacent codes shares a scale.
    const Tensor& like = found.scales ? *found.states[0] : param;
    row.param = lender.lend(param, like, true);
    row.grad = lender.lend(grad, like, false);
    bool is_contiguous = param.is_contiguous() && grad.is_contiguous();
    const auto lend = [&](const Tensor* tensor) -> void* {
      if (!tensor) return nullptr;
      is_contiguous &= tensor->is_contiguous();
      return lender.lend(*tensor, like, true);
    };
    for (int state = 0; state < Rule::kStates; ++state) row.states[state] = lend(found.states[state]);
    row.master = lend(found.master);
    if (found.scales) row.scales = checked_scales(i, param, found);
    checked_[i] = {true,
                   is_contiguous,
                   param.dtype(),
                   grad.dtype(),
                   found.states[0] ? found.states[0]->dtype() : 0,
                   found.master ? found.master->dtype() : 0};
  }

  static void fill_dtypes(StepRow& row, int32_t i, const Tensor& param, const Tensor& grad, const RowTensors& found) {
    const Tensor* const first = found.states[0];
    bool is_known = find_dtype(param.dtype(), &row.param_dtype) && find_dtype(grad.dtype(), &row.grad_dtype);
    const bool is_wide = row.param_dtype == Dtype::f64;
    if (!first && is_wide) row.state_dtype = Dtype::f64;
    if (first)
      is_known &=
          found.scales ? first->dtype() == aoti_torch_dtype_int8() : find_dtype(first->dtype(), &row.state_dtype);
    for (int state = 0; state < Rule::kStates; ++state) {
      const Tensor* const tensor = found.states[state];
      is_known &= tensor ? first && tensor->dtype() == first->dtype() : state >= Rule::kNeeded;
    }
    require(is_known && is_wide == (row.grad_dtype == Dtype::f64) && is_wide == (row.state_dtype == Dtype::f64) &&
                row.state_dtype != Dtype::f16,
            Rule::kOp, "dtypes of params, grads and states at " + std::to_string(i) + " do not go together");
    if (!found.master) return;
    const bool is_narrow = row.param_dtype == Dtype::f16 || row.param_dtype == Dtype::b16;
    row.master_kind = found.master->dtype() == aoti_torch_dtype_int16() ? Master::split : Master::fp32;
    require(is_narrow && (row.master_kind == Master::split || found.master->dtype() == aoti_torch_dtype_float32()),
            Rule::kOp, at("masters", i) + " goes with a 16-bit parameter only, in int16 or fp32");
  }

  static float* checked_scales(int32_t i, const Tensor& param, const RowTensors& found) {
    const Tensor &scales = *found.scales, &first = *found.states[0];
    int64_t states = 0;
    bool fits = scales.dtype() == aoti_torch_dtype_float32() && scales.is_contiguous() && first.is_dense() &&
                scales.device() == param.device();
    for (const Tensor* const state : found.states) {
      if (!state) continue;
      fits = fits && have_same_layout(*state, first);
      ++states;
    }
    require(fits && scales.size() >= states * scales_of(param.size()), Rule::kOp,
            at("scales", i) + " does not go with its states");
    return scales.data<float>();
  }

  const std::vector<TensorList> states_;
  const TensorList masters_, scales_, steps_;
  const std::vector<int64_t> group_sizes_;
  std::vector<StepRow> rows_;
  std::vector<Checked> checked_;
};

}  // namespace mpk
