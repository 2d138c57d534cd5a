// What the device keeps of a plan from step to step, as long as the plan's rows are the same.
#pragma once

#include "grads/grad_stats_torch.h"
#include "step/plan_torch.h"

#ifdef MPK_CUDA
namespace mpk {

// All of this memory is allocated, written and read on one stream. So it is written before it is read, and torch's
// allocator, which follows that stream, reuses the memory only after the last step.
template <class Rule>
class PlanOnDevice {
 public:
  PlanOnDevice(StepPlan<Rule>& plan, cudaStream_t stream)
      : stream(stream),
        table_(lay_out_on_cuda(plan.rows())),
        rows_(plan.like().scratch(sizeof(StepRow) * table_.count)),
        grads_(plan.like().scratch(sizeof(Row) * table_.count)),
        row_of_chunk_(plan.like().scratch(sizeof(int32_t) * table_.chunks)),
        tickets_(plan.like().scratch(sizeof(uint32_t) * (table_.count + 1))),
        chunk_scratch_(plan.like().scratch(std::max(sizeof(Stats), sizeof(Overflow)) * table_.chunks)),
        results_(plan.like(), table_.count) {
    const std::vector<StepRow>& rows = plan.rows();
    const KeptRows kept{rows_.data<StepRow>(), grads_.data<Row>(), row_of_chunk_.data<int32_t>(),
                        tickets_.data<uint32_t>()};
    require_success(step_upload_cuda(table_, kept, stream), Rule::kOp);
    for (int32_t end = 0; end < table_.count;) {
      const int32_t first = end;
      const auto fits = [&](int32_t row) {
        return row - first < Stretch::kMostRows && rows[row].group - rows[first].group < StepLaunch::kMostGroups;
      };
      while (end < table_.count && fits(end)) ++end;
      const int32_t end_chunk = end < table_.count ? rows[end].first_chunk : table_.chunks;
      launches_.push_back({{kept.grads, kept.row_of_chunk, table_.chunk_size, table_.count, first, end,
                            rows[first].first_chunk, end_chunk},
                           kept.rows,
                           rows[first].group,
                           rows[end - 1].group + 1,
                           needs_of<Rule>(&rows[first], rows.data() + end)});
    }
  }

  // Finds the grads' statistics. `grads` holds the address of each grad.
  void look(void* const* grads) const {
    for (const StepLaunch& launched : launches_) {
      require_success(grad_stats_cuda(launched.grads, grads, stats(), chunk_scratch_.data<Stats>(),
                                      tickets_.data<uint32_t>(), stream),
                      GradStatsCall::kOp);
    }
  }
  GradStats stats() const { return results_.pointers(); }

  void step(void* const* grads, const StepGroup<Rule>* groups, const StepShared& shared) const {
    for (const StepLaunch& launched : launches_) {
      require_success(step_cuda(launched, grads, groups, shared, tickets_.data<uint32_t>(),
                                chunk_scratch_.data<Overflow>(), stream),
                      Rule::kOp);
    }
  }

  const cudaStream_t stream;

 private:
  const TableOf<StepRow> table_;
  const Tensor rows_, grads_, row_of_chunk_, tickets_, chunk_scratch_;  // only kernels use these
  const GradStatsResults results_;
  std::vector<StepLaunch> launches_;
};

}  // namespace mpk
#endif
