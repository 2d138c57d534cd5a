// What the device keeps of a plan from step to step, as long as its rows are the same.
#pragma once

#include "adamw/adamw_torch.h"
#include "grads/grad_stats_torch.h"

#ifdef MPK_CUDA
namespace mpk {

// All of it is used on one stream, where it was allocated: so it is written there before it is read, and torch's
// allocator, which goes by that stream, gives it to nobody else before the last step is over.
class AdamwOnDevice {
 public:
  AdamwOnDevice(std::vector<AdamwRow>& rows, const Tensor& like, cudaStream_t stream)
      : stream(stream),
        table_(lay_out_on_cuda(rows)),
        rows_(like.scratch(sizeof(AdamwRow) * table_.count)),
        grads_(like.scratch(sizeof(Row) * table_.count)),
        row_of_chunk_(like.scratch(sizeof(int32_t) * table_.chunks)),
        tickets_(like.scratch(sizeof(uint32_t) * (table_.count + 1))),
        of_chunk_(like.scratch(std::max(sizeof(Stats), sizeof(Overflow)) * table_.chunks)),
        results_(like, table_.count) {
    const AdamwKept kept{rows_.data<AdamwRow>(), grads_.data<Row>(), row_of_chunk_.data<int32_t>(),
                         tickets_.data<uint32_t>()};
    require_success(adamw_upload_cuda(table_, kept, stream), AdamwPlan::kOp);
    for (int32_t end = 0; end < table_.count;) {
      const int32_t first = end;
      const auto fits = [&](int32_t row) {
        return row - first < Stretch::kMostRows && rows[row].group - rows[first].group < AdamwStretch::kMostGroups;
      };
      while (end < table_.count && fits(end)) ++end;
      const int32_t end_chunk = end < table_.count ? rows[end].first_chunk : table_.chunks;
      stretches_.push_back({{kept.grads, kept.row_of_chunk, table_.chunk_size, table_.count, first, end,
                             rows[first].first_chunk, end_chunk},
                            kept.rows,
                            rows[first].group,
                            rows[end - 1].group + 1,
                            needs_of(&rows[first], rows.data() + end)});
    }
  }

  // grads: the address of each.
  void look(void* const* grads) const {
    for (const AdamwStretch& stretch : stretches_) {
      require_success(
          grad_stats_cuda(stretch.grads, grads, stats(), of_chunk_.data<Stats>(), tickets_.data<uint32_t>(), stream),
          GradStatsCall::kOp);
    }
  }
  GradStats stats() const { return results_.pointers(); }

  void step(void* const* grads, const AdamwGroup* groups, const AdamwShared& shared) const {
    for (const AdamwStretch& stretch : stretches_) {
      require_success(
          adamw_cuda(stretch, grads, groups, shared, tickets_.data<uint32_t>(), of_chunk_.data<Overflow>(), stream),
          AdamwPlan::kOp);
    }
  }

  const cudaStream_t stream;

 private:
  const TableOf<AdamwRow> table_;
  const Tensor rows_, grads_, row_of_chunk_, tickets_, of_chunk_;  // for kernels alone
  const GradStatsResults results_;
  std::vector<AdamwStretch> stretches_;
};

}  // namespace mpk
#endif
