// A step's arguments beside its tensors: hyperparameters, scale, clipping, and where to write its outcome and report.
#pragma once

#include "grads/overflow_torch.h"
#include "step/plan_torch.h"

namespace mpk {

// Everything but params and grads that may differ from step to step.
template <class Rule>
class OptionArguments {
 public:
  // `plan` holds the parameters that these options apply to.
  OptionArguments(Arguments& arguments, const StepPlan<Rule>& plan)
      : groups(by_value(arguments)),
        on_device_(arguments.tensors()),
        grad_scale_(arguments.optional()),
        found_inf_(arguments.optional()),
        total_sumsq_(arguments.optional()),
        max_norm_(bit_cast<double>(arguments.take())),
        outcome_(arguments.optional()),
        skipped_steps_(arguments.optional()),
        report_(arguments.optional()),
        plan_(plan) {
    if (on_device_.count() == 0) return;
    for (size_t i = 0; i < Rule::kMayBeTensors * groups.size(); ++i) {
      require(i < static_cast<size_t>(on_device_.count()), Rule::kOp, "on_device is shorter than the groups need");
      if (on_device_[i].size() > 0) put_on_device(groups[i / Rule::kMayBeTensors], i);
    }
  }

  // `stats` points to the grads' statistics if the step has computed them; else its pointers are null.
  StepShared shared(const GradStats& stats) const {
    const int32_t fp32 = aoti_torch_dtype_float32(), fp64 = aoti_torch_dtype_float64();
    const auto* const grad_scale = pointer<const float>(grad_scale_, "grad_scale", fp32, 1);
    const auto* const found_inf = pointer<const float>(found_inf_, "found_inf", fp32, 1);
    const auto* const total_sumsq = pointer<const double>(total_sumsq_, "total_sumsq", fp64, 1);
    Overflow* const lines = report_ ? overflow_lines(*report_, plan_.count(), plan_.like(), Rule::kOp) : nullptr;
    return {grad_scale,
            {found_inf, stats.found_inf},
            stats.total_sumsq ? stats.total_sumsq : total_sumsq,
            max_norm_,
            pointer<float>(outcome_, "outcome", fp32, 2),
            pointer<float>(skipped_steps_, "skipped_steps", fp32, 1),
            {lines, grad_scale, /*is_unscaled=*/false}};
  }

  std::vector<StepGroup<Rule>> groups;

 private:
  static std::vector<StepGroup<Rule>> by_value(Arguments& arguments) {
    constexpr int count = sizeof(typename Rule::Hyperparameters) / sizeof(double);
    std::vector<double> values[count];
    for (auto& group_values : values) group_values = arguments.numbers<double>();
    const auto maximize = arguments.numbers<uint8_t>();
    std::vector<StepGroup<Rule>> groups(maximize.size());
    for (size_t group = 0; group < groups.size(); ++group) groups[group].maximize = maximize[group] != 0;
    for (int i = 0; i < count; ++i) {
      require(values[i].size() == groups.size(), Rule::kOp, "hyperparameters are not one for each group");
      for (size_t group = 0; group < groups.size(); ++group)
        memcpy(reinterpret_cast<char*>(&groups[group].by_value) + i * sizeof(double), &values[i][group],
               sizeof(double));
    }
    return groups;
  }

  void put_on_device(StepGroup<Rule>& group, size_t i) {
    const Tensor& tensor = on_device_[static_cast<int32_t>(i)];
    Dtype& dtype = group.dtypes[i % Rule::kMayBeTensors];
    const bool is_known = tensor.is_strided() && tensor.size() == 1 && find_dtype(tensor.dtype(), &dtype) &&
                          (dtype == Dtype::f32 || dtype == Dtype::f64);
    require(is_known && tensor.device() == plan_.like().device(), Rule::kOp,
            "on_device[" + std::to_string(i) + "] is not one fp32 or fp64 on the parameters' device");
    group.on_device[i % Rule::kMayBeTensors] = tensor.const_data();
  }

  template <class T>
  T* pointer(const std::unique_ptr<Tensor>& tensor, const char* name, int32_t dtype, int64_t size) const {
    if (!tensor) return nullptr;
    require(tensor->size() == size && tensor->dtype() == dtype && tensor->device() == plan_.like().device(), Rule::kOp,
            std::string(name) + " is not of the right size and dtype on the parameters' device");
    return static_cast<T*>(tensor->data());
  }

  const TensorList on_device_;
  const std::unique_ptr<Tensor> grad_scale_, found_inf_, total_sumsq_;
  const double max_norm_;
  const std::unique_ptr<Tensor> outcome_, skipped_steps_, report_;
  const StepPlan<Rule>& plan_;
};

}  // namespace mpk
