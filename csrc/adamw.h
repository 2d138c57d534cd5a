// adamw_: unscale, clip, skip, decay, moments, bias correction, master weight and 16-bit weight of any list of
// parameters, in one pass. Grads are read once and never written.
#pragma once

#include "common/cpu.h"
#include "common/table.h"
#include "split.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// How the true weight of a parameter is kept: as the parameter itself, beside it in fp32, or split over it and an
// int16.
enum class Master : int8_t { none, fp32, split };

struct AdamwRow {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  void* master;          // null where there is none
  float* step;
  int64_t size;
  int32_t first_chunk;
  int16_t group;
  Dtype param_dtype;
  Dtype grad_dtype;
  Dtype state_dtype;
  Master master_kind;
};

struct AdamwGroup {
  double lr, beta1, beta2, weight_decay, eps;
  const double* on_device;  // lr, beta1 and beta2 where they are tensors, else null
  bool maximize;
};

// What all parameters of a step share. The pointers are to the device, and null where there is no such thing.
struct AdamwShared {
  const float* grad_scale;    // grads are divided by it
  const float* found_inf;     // nothing moves unless it is 0
  const double* total_sumsq;  // of the grads as they are, for max_norm
  double max_norm;
};

// Everything that is the same for all elements of a parameter, computed in fp64 and rounded once to C.
template <class C>
struct AdamwScalars {
  C grad_factor, decay, weight1, beta2, weight2, step_size, eps;
};

template <class C>
MPK_FN AdamwScalars<C> adamw_scalars(const AdamwGroup& group, const AdamwShared& shared, float steps_before) {
  const double lr = group.on_device ? group.on_device[0] : group.lr;
  const double beta1 = group.on_device ? group.on_device[1] : group.beta1;
  const double beta2 = group.on_device ? group.on_device[2] : group.beta2;
  const double step = static_cast<double>(steps_before) + 1;
  double factor = shared.grad_scale ? static_cast<float>(1 / static_cast<double>(*shared.grad_scale)) : 1.0;
  if (shared.total_sumsq) {
    const double coefficient = shared.max_norm / (sqrt(*shared.total_sumsq) * factor + 1e-6);
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

MPK_FOR_EACH_ISA(void adamw_span(const AdamwRow& row, const Span& span, const AdamwGroup& group,
                                 const AdamwShared& shared))

#ifdef MPK_CUDA
// tickets: scratch, one for each row.
cudaError_t adamw_cuda(const TableOf<AdamwRow>& table, const AdamwGroup* groups, int32_t group_count,
                       const AdamwShared& shared, uint32_t* tickets, cudaStream_t stream);
#endif

}  // namespace mpk
