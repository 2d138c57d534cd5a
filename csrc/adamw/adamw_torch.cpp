#include "adamw/adamw_torch.h"

#include <mutex>
#include <unordered_map>

#include "grads/grad_stats_torch.h"
#include "grads/overflow_torch.h"

namespace mpk {

static constexpr const char* kOp = AdamwPlan::kOp;

// Everything that may differ from step to step.
class AdamwCall {
 public:
  // stack: the arguments from lr to report.
  AdamwCall(AdamwPlan& plan, StableIValue params, StableIValue grads, const StableIValue* stack)
      : plan_(plan),
        params_(params),
        grads_(grads),
        on_device_(stack[6]),
        grad_scale_(take_optional(stack[7])),
        found_inf_(take_optional(stack[8])),
        total_sumsq_(take_optional(stack[9])),
        max_norm_(bit_cast<double>(stack[10])),
        outcome_(take_optional(stack[11])),
        skipped_steps_(take_optional(stack[12])),
        report_(take_optional(stack[13])) {
    const auto lr = take_numbers<double>(stack[0]), beta1 = take_numbers<double>(stack[1]);
    const auto beta2 = take_numbers<double>(stack[2]), weight_decay = take_numbers<double>(stack[3]);
    const auto eps = take_numbers<double>(stack[4]);
    const auto maximize = take_numbers<uint8_t>(stack[5]);
    for (size_t group = 0; group < lr.size(); ++group) {
      groups_.push_back({lr[group],
                         beta1.at(group),
                         beta2.at(group),
                         weight_decay.at(group),
                         eps.at(group),
                         {},
                         {},
                         maximize.at(group) != 0});
      for (int i = 0; i < 3 && on_device_.count() > 0; ++i) take_tensor(groups_.back(), i, 3 * group + i);
    }
  }

  void on_cpu(bool guarded) {
    if (plan_.count() == 0) return;
    plan_.fill_rows(params_, grads_, groups_, lender_);
    std::vector<AdamwRow>& rows = plan_.rows();
    GradStatsCall* const stats = look_at_grads(guarded, rows);
    if (stats) stats->on_cpu();
    const AdamwShared shared = this->shared(stats);
    tell(shared);
    if (is_skipped(shared)) {
      if (shared.report.lines) overflow_on_cpu(grads_of(rows), shared.report);
      return;
    }
    const auto table = lay_out(rows, kCpuChunk / 4);  // each element is some 28 bytes
    const std::vector<AdamwScalars<double>> scalars = plan_.scalars(shared);
    const auto adamw_span = MPK_BEST(adamw_span);
    parallel_for_chunks(table, elements(rows), [&](const AdamwRow& row, const Span& span) {
      if (span.size > 0) adamw_span(row, span, scalars[span.row]);
    });
    for (const AdamwRow& row : rows) *row.step += 1;
    lender_.return_copies();
  }

#ifdef MPK_CUDA
  void on_cuda(bool guarded) {
    if (plan_.count() == 0) return;
    const OnDeviceOf device(plan_.like());
    plan_.fill_rows(params_, grads_, groups_, lender_);
    std::vector<AdamwRow>& rows = plan_.rows();
    GradStatsCall* const stats = look_at_grads(guarded, rows);
    if (stats) stats->on_cuda(device.stream());
    const auto table = lay_out_on_cuda(rows);
    // In memory that nobody touches unless the step is skipped, before the tickets.
    const int64_t shares = report_ ? sizeof(Overflow) * table.chunks : 0;
    const Tensor scratch = plan_.like().scratch(shares + sizeof(uint32_t) * table.count);
    const RowMemory<AdamwRow> memory(table, plan_.like());
    auto* const tickets = reinterpret_cast<uint32_t*>(scratch.data<char>() + shares);
    require_success(adamw_cuda(table, memory.get(), shared(stats), tickets, scratch.data<Overflow>(), device.stream()),
                    kOp);
    lender_.return_copies();
  }
#endif

 private:
  void take_tensor(AdamwGroup& group, int which, size_t i) {
    require(i < static_cast<size_t>(on_device_.count()), kOp, "on_device is shorter than three times the groups");
    const Tensor& tensor = on_device_[static_cast<int32_t>(i)];
    if (tensor.size() == 0) return;
    const bool is_known = tensor.is_strided() && tensor.size() == 1 &&
                          find_dtype(tensor.dtype(), &group.dtypes[which]) &&
                          (group.dtypes[which] == Dtype::f32 || group.dtypes[which] == Dtype::f64);
    require(is_known && tensor.device() == plan_.like().device(), kOp,
            "on_device[" + std::to_string(i) + "] is not one fp32 or fp64 on the parameters' device");
    group.on_device[which] = tensor.const_data();
  }

  static int64_t elements(const std::vector<AdamwRow>& rows) {
    int64_t sum = 0;
    for (const AdamwRow& row : rows) sum += row.size;
    return sum;
  }

  static std::vector<Row> grads_of(const std::vector<AdamwRow>& rows) {
    std::vector<Row> grads;
    grads.reserve(rows.size());
    for (const AdamwRow& row : rows) grads.push_back(grad_of(row));
    return grads;
  }

  GradStatsCall* look_at_grads(bool guarded, const std::vector<AdamwRow>& rows) {
    if (guarded) {
      stats_ = std::make_unique<GradStatsCall>(plan_.like(), grads_of(rows));
    }
    return stats_.get();
  }

  AdamwShared shared(const GradStatsCall* stats) const {
    const int32_t fp32 = aoti_torch_dtype_float32(), fp64 = aoti_torch_dtype_float64();
    const Tensor* const total_sumsq = stats ? &stats->total_sumsq : total_sumsq_.get();
    const auto pointer = [&](const Tensor* tensor, const char* name, int32_t dtype, int64_t size) {
      if (!tensor) return static_cast<void*>(nullptr);
      require(tensor->size() == size && tensor->dtype() == dtype && tensor->device() == plan_.like().device(), kOp,
              std::string(name) + " is not of the right size and dtype on the parameters' device");
      return tensor->data();
    };
    const auto* const grad_scale = static_cast<const float*>(pointer(grad_scale_.get(), "grad_scale", fp32, 1));
    Overflow* const lines = report_ ? overflow_lines(*report_, plan_.count(), plan_.like(), kOp) : nullptr;
    return {grad_scale,
            {static_cast<const float*>(pointer(found_inf_.get(), "found_inf", fp32, 1)),
             static_cast<const float*>(pointer(stats ? &stats->found_inf : nullptr, "found_inf", fp32, 1))},
            static_cast<const double*>(pointer(total_sumsq, "total_sumsq", fp64, 1)),
            max_norm_,
            static_cast<float*>(pointer(outcome_.get(), "outcome", fp32, 2)),
            static_cast<float*>(pointer(skipped_steps_.get(), "skipped_steps", fp32, 1)),
            {lines, grad_scale, /*is_unscaled=*/false}};
  }

  AdamwPlan& plan_;
  TensorList params_, grads_, on_device_;
  std::unique_ptr<Tensor> grad_scale_, found_inf_, total_sumsq_;
  double max_norm_;
  std::unique_ptr<Tensor> outcome_, skipped_steps_, report_;
  std::vector<AdamwGroup> groups_;
  std::unique_ptr<GradStatsCall> stats_;
  Lender lender_;
};

template <class Run>
static void adamw(StableIValue* stack, const Run& run) {
  AdamwPlan plan(stack[2], stack[3], stack[4], stack[5], stack[6], stack[7], stack[8]);
  AdamwCall call(plan, stack[0], stack[1], stack + 9);
  run(call, /*guarded=*/false);
}

// Plans live from adamw_plan to adamw_forget. Python knows them by number.
class AdamwPlans {
 public:
  int64_t add(std::shared_ptr<AdamwPlan> plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    plans_[++newest_] = std::move(plan);
    return newest_;
  }
  std::shared_ptr<AdamwPlan> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(number);
    require(found != plans_.end(), kOp, "there is no plan " + std::to_string(number));
    return found->second;
  }
  void forget(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    plans_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<AdamwPlan>> plans_;
  int64_t newest_ = 0;
};

static AdamwPlans& plans() {
  static AdamwPlans& all = *new AdamwPlans;  // never destroyed: when Python ends, its tensors may outlive torch
  return all;
}

static void adamw_plan(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] =
      plans().add(std::make_shared<AdamwPlan>(stack[0], stack[1], stack[2], stack[3], stack[4], stack[5], stack[6]));
}

static void adamw_forget(StableIValue* stack, uint64_t, uint64_t) { plans().forget(static_cast<int64_t>(stack[0])); }

template <class Run>
static void adamw_by_plan(StableIValue* stack, const Run& run) {
  const std::shared_ptr<AdamwPlan> plan = plans().find(static_cast<int64_t>(stack[0]));
  AdamwCall call(*plan, stack[1], stack[2], stack + 3);
  run(call, /*guarded=*/stack[17] != 0);
}

static void adamw_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  adamw(stack, [](AdamwCall& call, bool guarded) { call.on_cpu(guarded); });
}
static void adamw_by_plan_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  adamw_by_plan(stack, [](AdamwCall& call, bool guarded) { call.on_cpu(guarded); });
}
MPK_CPU_KERNEL(kOp, adamw_on_cpu)
MPK_CPU_KERNEL("adamw_by_plan_", adamw_by_plan_on_cpu)
MPK_CPU_KERNEL("adamw_plan", adamw_plan)
MPK_KERNEL_WITHOUT_TENSORS("adamw_forget", adamw_forget)

#ifdef MPK_CUDA
static void adamw_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  adamw(stack, [](AdamwCall& call, bool guarded) { call.on_cuda(guarded); });
}
static void adamw_by_plan_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  adamw_by_plan(stack, [](AdamwCall& call, bool guarded) { call.on_cuda(guarded); });
}
MPK_CUDA_KERNEL(kOp, adamw_on_cuda)
MPK_CUDA_KERNEL("adamw_by_plan_", adamw_by_plan_on_cuda)
MPK_CUDA_KERNEL("adamw_plan", adamw_plan)
#endif

}  // namespace mpk
