// adamw_: unscale, clip, skip, decay, moments, bias correction, master weight and 16-bit weight of any list of
// parameters, in one pass. Grads are read once and never written.
#pragma once

#include "adamw/int8.h"
#include "adamw/split.h"
#include "common/cpu.h"
#include "common/table.h"
#include "grads/grad_stats.h"
#include "grads/overflow.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// How the true weight of a parameter is kept: as the parameter itself, beside it in fp32, or split over it and an
// int16.
enum class Master : int8_t { none, fp32, split };

MPK_FN int64_t width_of(Master kind) { return kind == Master::split ? 2 : 4; }

struct AdamwGroup {
  double lr, beta1, beta2, weight_decay, eps;
  const void* on_device[3];  // lr, beta1 and beta2 where they are tensors, else null
  Dtype dtypes[3];           // of those, fp32 or fp64
  bool maximize;
};

struct AdamwRow {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  void* master;          // null where there is none
  float* scales;         // of moments in 8 bits (int8.h), blocks of exp_avg first, then those of the others; else null
  float* step;
  int64_t size;
  int64_t group;
  int32_t first_chunk;
  Dtype param_dtype;
  Dtype grad_dtype;
  Dtype state_dtype;  // fp32 if the moments have 8 bits: they are computed with in that
  Master master_kind;
};
static_assert(std::has_unique_object_representations_v<AdamwRow>);  // so that bytes tell whether two are the same

MPK_FN Row grad_of(const AdamwRow& row) {
  return {const_cast<void*>(row.grad), row.size, row.first_chunk, row.grad_dtype};
}

MPK_FN int64_t bytes_read(const AdamwRow& row) {
  const int64_t state_width = row.scales ? 1 : width_of(row.state_dtype);
  return row.size * (width_of(row.param_dtype) + width_of(row.grad_dtype) +
                     (row.master ? width_of(row.master_kind) : 0) + state_width * (row.max_exp_avg_sq ? 3 : 2));
}

// What all parameters of a step share. The pointers are to the device, and null where there is no such thing.
struct AdamwShared {
  const float* grad_scale;    // grads are divided by it
  const float* found_inf[2];  // the scaler's and the guard's: nothing moves unless both are 0
  const double* total_sumsq;  // of the grads as they are
  double max_norm;            // inf: no clipping
  float* outcome;         // the norm of the unscaled grads, if total_sumsq is there; 1 if the step is skipped, else 0
  float* skipped_steps;   // counted up
  OverflowReport report;  // filled if the step is skipped
};

MPK_FN double unscale_factor(const AdamwShared& shared) {
  return shared.grad_scale ? static_cast<float>(1 / static_cast<double>(*shared.grad_scale)) : 1.0;
}

MPK_FN double unscaled_norm(const AdamwShared& shared) { return sqrt(*shared.total_sumsq) * unscale_factor(shared); }

// Finite grads overflow, too, where a scale below 1 is taken off them: their norm is then beyond fp32.
MPK_FN bool is_skipped(const AdamwShared& shared) {
  for (const float* found_inf : shared.found_inf) {
    if (found_inf && *found_inf != 0) return true;
  }
  return shared.grad_scale && shared.total_sumsq && unscaled_norm(shared) > 0x1.fffffep127;
}

// What the optimizer says of the step.
MPK_FN void tell(const AdamwShared& shared) {
  const bool skipped = is_skipped(shared);
  if (shared.outcome) {
    if (shared.total_sumsq) shared.outcome[0] = static_cast<float>(unscaled_norm(shared));
    shared.outcome[1] = skipped ? 1.0f : 0.0f;
  }
  if (shared.skipped_steps && skipped) *shared.skipped_steps += 1;
}

MPK_FN double hyperparameter(const AdamwGroup& group, int which, double by_value) {
  const void* const tensor = group.on_device[which];
  if (!tensor) return by_value;
  return group.dtypes[which] == Dtype::f64 ? *static_cast<const double*>(tensor) : *static_cast<const float*>(tensor);
}

// Everything that is the same for all elements of a parameter, computed in fp64 and rounded once to C.
template <class C>
struct AdamwScalars {
  C grad_factor, decay, weight1, beta2, weight2, step_size, eps;

  template <class To>
  MPK_FN AdamwScalars<To> rounded() const {
    return {static_cast<To>(grad_factor), static_cast<To>(decay),     static_cast<To>(weight1), static_cast<To>(beta2),
            static_cast<To>(weight2),     static_cast<To>(step_size), static_cast<To>(eps)};
  }
};

// steps: that the parameter has taken so far.
template <class C>
MPK_FN AdamwScalars<C> adamw_scalars(const AdamwGroup& group, float steps, const AdamwShared& shared) {
  const double lr = hyperparameter(group, 0, group.lr);
  const double beta1 = hyperparameter(group, 1, group.beta1);
  const double beta2 = hyperparameter(group, 2, group.beta2);
  const double step = static_cast<double>(steps) + 1;
  double factor = unscale_factor(shared);
  if (shared.total_sumsq && shared.max_norm < INFINITY) {
    const double coefficient = shared.max_norm / (unscaled_norm(shared) + 1e-6);
    if (!(coefficient >= 1)) factor *= coefficient;  // NaN stays NaN
  }
  if (group.maximize) factor = -factor;
  const double correction2 = sqrt(1 - pow(beta2, step));
  return {static_cast<C>(factor),
          static_cast<C>(1 - lr * group.weight_decay),
          static_cast<C>(1 - beta1),
          static_cast<C>(beta2),
          static_cast<C>(1 - beta2),
          static_cast<C>(lr / (1 - pow(beta1, step)) * correction2),
          static_cast<C>(group.eps * correction2)};
}

template <class F>
struct AdamwElement {
  F param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// One step of torch.optim.AdamW (foreach=False), in its order of operations, but that the root's bias correction is in
// step_size and eps: one division less, and division is what a CPU would otherwise wait for. F is C or a vector of it.
template <class F, class C>
MPK_FN AdamwElement<F> adamw(const AdamwElement<F>& before, F scaled_grad, bool amsgrad, const AdamwScalars<C>& by) {
  AdamwElement<F> after = before;
  const F grad = scaled_grad * by.grad_factor;
  after.param = before.param * by.decay;
  after.exp_avg = before.exp_avg + (grad - before.exp_avg) * by.weight1;
  after.exp_avg_sq = before.exp_avg_sq * by.beta2 + grad * by.weight2 * grad;
  if (amsgrad) after.max_exp_avg_sq = maximum(before.max_exp_avg_sq, after.exp_avg_sq);
  const F root = SquareRoot<F>::of(amsgrad ? after.max_exp_avg_sq : after.exp_avg_sq);
  after.param = after.param - by.step_size * after.exp_avg / (root + by.eps);
  return after;
}

MPK_FOR_EACH_ISA(void adamw_span(const AdamwRow& row, const Span& span, const AdamwScalars<double>& by))

#ifdef MPK_CUDA
// What the device keeps of a plan, and kernels find there at each step.
struct AdamwKept {
  AdamwRow* rows;  // without `grad`
  Row* grads;      // likewise, for kernels that see no more of a row
  int32_t* row_of_chunk;
  uint32_t* tickets;  // 0 between launches: one for each row and one more
};

// What the rows need of a kernel. The more it can do, the more registers it takes, and the fewer blocks fit
// a multiprocessor.
enum class Needs { common, codes, all };

inline Needs needs_of(const AdamwRow* first, const AdamwRow* end) {
  Needs needs = Needs::common;
  for (const AdamwRow* row = first; row < end; ++row) {
    if (row->param_dtype == Dtype::f64 || row->max_exp_avg_sq) return Needs::all;
    if (row->scales) needs = Needs::codes;
  }
  return needs;
}

// What one launch takes of it.
struct AdamwStretch {
  static constexpr int kMostGroups = 60;

  Stretch grads;
  const AdamwRow* rows;  // all of them
  int64_t first_group, end_group;
  Needs needs;
};

cudaError_t adamw_upload_cuda(const TableOf<AdamwRow>& table, const AdamwKept& to, cudaStream_t stream);

// grads, groups: the addresses and hyperparameters of all rows and groups, on the host; tickets: one for each row;
// of_chunk: scratch, one for each chunk.
cudaError_t adamw_cuda(const AdamwStretch& stretch, void* const* grads, const AdamwGroup* groups,
                       const AdamwShared& shared, uint32_t* tickets, Overflow* of_chunk, cudaStream_t stream);
#endif

}  // namespace mpk
