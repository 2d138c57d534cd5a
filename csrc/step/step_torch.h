// The ops of a rule: its step, and the same step over a plan that C++ keeps. A rule's *_torch.cpp registers them.
#pragma once

#include <mutex>
#include <unordered_map>

#include "step/options_torch.h"
#include "step/plan_on_device_torch.h"

namespace mpk {

template <class Rule>
class StepCall {
 public:
  StepCall(StepPlan<Rule>& plan, const WeightArguments& weights, Arguments& arguments)
      : plan_(plan), weights_(weights), options_(arguments, plan) {}

  void on_cpu(bool guarded) {
    if (plan_.count() == 0) return;
    plan_.fill_rows(weights_, options_.groups.size(), lender_);
    std::vector<StepRow>& rows = plan_.rows();
    std::unique_ptr<GradStatsCall> stats;
    if (guarded) {
      stats = std::make_unique<GradStatsCall>(plan_.like(), grads_of(rows));
      stats->on_cpu();
    }
    const StepShared shared = options_.shared(stats ? stats->results.pointers() : GradStats{});
    write_outcome(shared);
    if (is_skipped(shared)) {
      if (shared.report.lines) overflow_on_cpu(grads_of(rows), shared.report);
      return;
    }
    const auto table = lay_out(rows, kCpuChunk / 4);  // a step takes some 28 bytes for each element
    const auto scalars = plan_.scalars(options_.groups, shared);
    const auto step_span = MPK_BEST(step_span<Rule>);
    parallel_for_chunks(table, elements_of(rows), [&](const StepRow& row, const Span& span) {
      if (span.size > 0) step_span(row, span, scalars[span.row]);
    });
    for (const StepRow& row : rows) *row.step += 1;
    lender_.return_copies();
  }

#ifdef MPK_CUDA
  void on_cuda(bool guarded) {
    if (plan_.count() == 0) return;
    const OnDeviceOf device(plan_.like());
    plan_.fill_rows(weights_, options_.groups.size(), lender_);
    // A graph may outlive the plan, so each of its replays writes the rows to memory of the graph's own.
    const bool is_captured = is_capturing(device.stream());
    // `kept` is put back only after a step without an error, because an error may leave tickets that are not 0.
    std::shared_ptr<PlanOnDevice<Rule>> kept = is_captured ? nullptr : std::exchange(plan_.on_device, nullptr);
    if (!kept || kept->stream != device.stream()) kept = std::make_shared<PlanOnDevice<Rule>>(plan_, device.stream());
    std::vector<void*> grads;
    grads.reserve(plan_.count());
    for (const StepRow& row : plan_.rows()) grads.push_back(grad_of(row).data);
    if (guarded) kept->look(grads.data());
    kept->step(grads.data(), options_.groups.data(), options_.shared(guarded ? kept->stats() : GradStats{}));
    if (!is_captured) plan_.on_device = std::move(kept);
    lender_.return_copies();
  }
#endif

 private:
  static std::vector<Row> grads_of(const std::vector<StepRow>& rows) {
    std::vector<Row> grads;
    grads.reserve(rows.size());
    for (const StepRow& row : rows) grads.push_back(grad_of(row));
    return grads;
  }

  StepPlan<Rule>& plan_;
  const WeightArguments& weights_;
  OptionArguments<Rule> options_;
  Lender lender_;
};

// A rule's plans live from <rule>_plan to <rule>_forget. Python knows them by number.
template <class Rule>
class StepPlans {
 public:
  int64_t add(std::shared_ptr<StepPlan<Rule>> plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    plans_[++newest_] = std::move(plan);
    return newest_;
  }
  std::shared_ptr<StepPlan<Rule>> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(number);
    require(found != plans_.end(), Rule::kOp, "there is no plan " + std::to_string(number));
    return found->second;
  }
  void forget(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    plans_.erase(number);
  }

  static StepPlans& all() {
    static StepPlans& plans = *new StepPlans;  // never destroyed: when Python ends, its tensors may outlive torch
    return plans;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<StepPlan<Rule>>> plans_;
  int64_t newest_ = 0;
};

// A rule's ops as torch calls them.
template <class Rule>
struct StepOps {
  using Call = StepCall<Rule>;

  template <void (Call::*run)(bool)>
  static void step(StableIValue* stack, uint64_t, uint64_t) {
    Arguments arguments(stack);
    const WeightArguments weights(arguments);
    StepPlan<Rule> plan(arguments);
    Call call(plan, weights, arguments);
    (call.*run)(/*guarded=*/false);
  }

  template <void (Call::*run)(bool)>
  static void step_by_plan(StableIValue* stack, uint64_t, uint64_t) {
    Arguments arguments(stack);
    const auto plan = StepPlans<Rule>::all().find(static_cast<int64_t>(arguments.take()));
    const WeightArguments weights(arguments);
    Call call(*plan, weights, arguments);
    (call.*run)(/*guarded=*/arguments.take() != 0);
  }

  static void plan(StableIValue* stack, uint64_t, uint64_t) {
    Arguments arguments(stack);
    stack[0] = StepPlans<Rule>::all().add(std::make_shared<StepPlan<Rule>>(arguments));
  }

  static void forget(StableIValue* stack, uint64_t, uint64_t) {
    StepPlans<Rule>::all().forget(static_cast<int64_t>(stack[0]));
  }
};

}  // namespace mpk

#define MPK_STEP_OPS_ON_CPU(Rule, name)                                                                      \
  MPK_CPU_KERNEL(name "_", mpk::StepOps<mpk::Rule>::step<&mpk::StepCall<mpk::Rule>::on_cpu>)                 \
  MPK_CPU_KERNEL(name "_by_plan_", mpk::StepOps<mpk::Rule>::step_by_plan<&mpk::StepCall<mpk::Rule>::on_cpu>) \
  MPK_CPU_KERNEL(name "_plan", mpk::StepOps<mpk::Rule>::plan)                                                \
  MPK_KERNEL_WITHOUT_TENSORS(name "_forget", mpk::StepOps<mpk::Rule>::forget)
#ifdef MPK_CUDA
#define MPK_STEP_OPS(Rule, name)                                                                               \
  MPK_STEP_OPS_ON_CPU(Rule, name)                                                                              \
  MPK_CUDA_KERNEL(name "_", mpk::StepOps<mpk::Rule>::step<&mpk::StepCall<mpk::Rule>::on_cuda>)                 \
  MPK_CUDA_KERNEL(name "_by_plan_", mpk::StepOps<mpk::Rule>::step_by_plan<&mpk::StepCall<mpk::Rule>::on_cuda>) \
  MPK_CUDA_KERNEL(name "_plan", mpk::StepOps<mpk::Rule>::plan)
#else
#define MPK_STEP_OPS(Rule, name) MPK_STEP_OPS_ON_CPU(Rule, name)
#endif
