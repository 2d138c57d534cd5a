#include "adamw.h"
#include "common/torch.h"

namespace mpk {

static constexpr const char* kOp = "adamw_";

// The op's arguments in the order of its schema, checked, and lined up as rows.
class AdamwCall {
 public:
  explicit AdamwCall(StableIValue* stack)
      : params_(stack[0]),
        grads_(stack[1]),
        exp_avgs_(stack[2]),
        exp_avg_sqs_(stack[3]),
        max_exp_avg_sqs_(stack[4]),
        masters_(stack[5]),
        steps_(stack[6]),
        on_device_(stack[14]),
        grad_scale_(take_optional(stack[15])),
        found_inf_(take_optional(stack[16])),
        total_sumsq_(take_optional(stack[17])) {
    const auto sizes = take_numbers<int64_t>(stack[7]);
    const auto lr = take_numbers<double>(stack[8]), beta1 = take_numbers<double>(stack[9]);
    const auto beta2 = take_numbers<double>(stack[10]), weight_decay = take_numbers<double>(stack[11]);
    const auto eps = take_numbers<double>(stack[12]);
    const auto maximize = take_numbers<uint8_t>(stack[13]);
    shared_ = {static_cast<const float*>(scalar(grad_scale_.get(), "grad_scale", aoti_torch_dtype_float32())),
               static_cast<const float*>(scalar(found_inf_.get(), "found_inf", aoti_torch_dtype_float32())),
               static_cast<const double*>(scalar(total_sumsq_.get(), "total_sumsq", aoti_torch_dtype_float64())),
               bit_cast<double>(stack[18])};
    for (size_t group = 0; group < sizes.size(); ++group) {
      const bool tensors = on_device_.count() > 0 && on_device_[group].size() == 3;
      groups_.push_back({lr.at(group), beta1.at(group), beta2.at(group), weight_decay.at(group), eps.at(group),
                         tensors ? static_cast<const double*>(on_device_[group].const_data()) : nullptr,
                         maximize.at(group) != 0});
      for (int64_t i = 0; i < sizes[group]; ++i) add_row(static_cast<int16_t>(group));
    }
    require(static_cast<int32_t>(rows_.size()) == params_.count(), kOp, "group_sizes do not add up to the parameters");
  }

  TableOf<AdamwRow> table(int64_t chunk_size) { return lay_out(rows_, chunk_size); }
  int64_t elements() const { return elements_; }
  const Tensor& a_param() const { return params_.front(); }
  const AdamwShared& shared() const { return shared_; }
  const std::vector<AdamwGroup>& groups() const { return groups_; }
  void return_copies() { lender_.return_copies(); }

 private:
  const void* scalar(const Tensor* tensor, const char* name, int32_t dtype) const {
    if (!tensor) return nullptr;
    require(tensor->size() == 1 && tensor->dtype() == dtype && tensor->device() == a_param().device(), kOp,
            std::string(name) + " is not a scalar of the right dtype on the parameters' device");
    return tensor->const_data();
  }

  // Entry i of a list that goes along with the parameters; null where the list or the entry is empty.
  const Tensor* entry(const TensorList& list, int32_t i, const char* name) const {
    if (list.count() == 0) return nullptr;
    require(i < list.count(), kOp, std::string(name) + " is shorter than params");
    const Tensor& tensor = list[i];
    if (tensor.size() == 0) return nullptr;
    if (!tensor.is_strided() || tensor.device() != a_param().device() || !have_same_shape(tensor, params_[i])) {
      require(false, kOp,
              std::string(name) + "[" + std::to_string(i) + "] is not dense, elsewhere or of another shape");
    }
    return &tensor;
  }

  void add_row(int16_t group) {
    const auto i = static_cast<int32_t>(rows_.size());
    require(i < params_.count() && i < steps_.count(), kOp, "group_sizes or steps do not go with params");
    const Tensor& param = params_[i];
    AdamwRow row{};
    row.group = group;
    row.size = param.size();
    require(steps_[i].is_fp32_scalar() && steps_[i].device() == param.device(), kOp,
            "steps[" + std::to_string(i) + "] is not a single fp32 on the parameters' device");
    row.step = steps_[i].data<float>();
    if (row.size > 0) fill(row, i);
    rows_.push_back(row);
    elements_ += row.size;
  }

  void fill(AdamwRow& row, int32_t i) {
    const Tensor* const param = entry(params_, i, "params");
    const Tensor* const grad = entry(grads_, i, "grads");
    const Tensor* const exp_avg = entry(exp_avgs_, i, "exp_avgs");
    const Tensor* const exp_avg_sq = entry(exp_avg_sqs_, i, "exp_avg_sqs");
    const Tensor* const largest = entry(max_exp_avg_sqs_, i, "max_exp_avg_sqs");
    const Tensor* const master = entry(masters_, i, "masters");
    const bool known = grad && exp_avg && exp_avg_sq && find_dtype(param->dtype(), &row.param_dtype) &&
                       find_dtype(grad->dtype(), &row.grad_dtype) && find_dtype(exp_avg->dtype(), &row.state_dtype) &&
                       exp_avg_sq->dtype() == exp_avg->dtype() && (!largest || largest->dtype() == exp_avg->dtype());
    const bool wide = row.param_dtype == Dtype::f64;
    require(known && wide == (row.grad_dtype == Dtype::f64) && wide == (row.state_dtype == Dtype::f64) &&
                row.state_dtype != Dtype::f16,
            kOp, "dtypes of params, grads and states at " + std::to_string(i) + " do not go together");
    if (master) row.master_kind = master->dtype() == aoti_torch_dtype_int16() ? Master::split : Master::fp32;
    const bool narrow = row.param_dtype == Dtype::f16 || row.param_dtype == Dtype::b16;
    require(!master || (narrow && (row.master_kind == Master::split || master->dtype() == aoti_torch_dtype_float32())),
            kOp, "masters[" + std::to_string(i) + "] goes with a 16-bit parameter only, in int16 or fp32");
    row.param = lender_.lend(*param, *param, true);
    row.grad = lender_.lend(*grad, *param, false);
    row.exp_avg = lender_.lend(*exp_avg, *param, true);
    row.exp_avg_sq = lender_.lend(*exp_avg_sq, *param, true);
    row.max_exp_avg_sq = largest ? lender_.lend(*largest, *param, true) : nullptr;
    row.master = master ? lender_.lend(*master, *param, true) : nullptr;
  }

  TensorList params_, grads_, exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_, masters_, steps_, on_device_;
  std::unique_ptr<Tensor> grad_scale_, found_inf_, total_sumsq_;
  AdamwShared shared_{};
  std::vector<AdamwGroup> groups_;
  std::vector<AdamwRow> rows_;
  Lender lender_;
  int64_t elements_ = 0;
};

static void adamw_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  AdamwCall call(stack);
  const AdamwShared& shared = call.shared();
  if (shared.found_inf && *shared.found_inf != 0) return;
  const auto table = call.table(kCpuChunk / 4);  // each element is some 28 bytes
  const auto adamw_span = MPK_BEST(adamw_span);
  parallel_for_chunks(table, call.elements(), [&](const AdamwRow& row, const Span& span) {
    if (span.size > 0) adamw_span(row, span, call.groups()[row.group], shared);
  });
  for (int32_t i = 0; i < table.count; ++i) *table.rows[i].step += 1;
  call.return_copies();
}
MPK_CPU_KERNEL(kOp, adamw_on_cpu)

#ifdef MPK_CUDA
static void adamw_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  AdamwCall call(stack);
  const OnDeviceOf device(call.a_param());
  const auto table = call.table(cuda_chunk(call.elements()));
  const Tensor tickets = call.a_param().scratch(sizeof(uint32_t) * table.count);
  require_success(adamw_cuda(table, call.groups().data(), static_cast<int32_t>(call.groups().size()), call.shared(),
                             tickets.data<uint32_t>(), device.stream()),
                  kOp);
  call.return_copies();
}
MPK_CUDA_KERNEL(kOp, adamw_on_cuda)
#endif

}  // namespace mpk
