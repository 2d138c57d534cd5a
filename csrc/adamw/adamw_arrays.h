// The arrays of a row as a CUDA block goes through them, and the kinds of rows that have loops of their own.
#pragma once

#include "adamw/adamw.h"
#include "common/cuda.h"

namespace mpk {

// What a thread takes at once: two packs of adjacent elements, or two or four single ones where arrays do not lie
// alike. A pack is 16 bytes in fp32, 8 in 16-bit formats, 4 in codes. So a warp touches adjacent bytes in every format,
// and formats mix as long as all arrays begin at the same place of a pack.
static constexpr uint32_t kPack = 4, kPacks = 2;

// A row's arrays from a span's first element on.
struct Arrays {
  char *param, *exp_avg, *exp_avg_sq, *largest, *master;
  const char* grad;
  Dtype param_dtype, grad_dtype, state_dtype;
  Master master_kind;
  bool amsgrad;
};

template <Needs needs>
__device__ Arrays arrays_at(const AdamwRow& row, int64_t begin) {
  const auto at = [&](void* array, int64_t width) { return static_cast<char*>(array) + begin * width; };
  const int64_t state_width = row.scales ? 1 : width_of(row.state_dtype);
  return {at(row.param, width_of(row.param_dtype)),
          at(row.exp_avg, state_width),
          at(row.exp_avg_sq, state_width),
          at(row.max_exp_avg_sq, state_width),
          at(row.master, width_of(row.master_kind)),
          static_cast<const char*>(row.grad) + begin * width_of(row.grad_dtype),
          row.param_dtype,
          row.grad_dtype,
          row.state_dtype,
          row.master_kind,
          needs == Needs::all && row.max_exp_avg_sq};
}

// How many elements lie before the first pack; kPack if the arrays do not agree.
static __device__ int head_of(const Arrays& arrays, int64_t state_width) {
  const auto head = [](const void* array, int64_t width) {
    const auto address = reinterpret_cast<uintptr_t>(array);
    return static_cast<int>(-(width == 4 ? address / 4 : width == 2 ? address / 2 : address) % kPack);
  };
  const int first = head(arrays.param, width_of(arrays.param_dtype));
  const auto agrees = [&](const void* array, int64_t width) { return head(array, width) == first; };
  const bool all = agrees(arrays.grad, width_of(arrays.grad_dtype)) && agrees(arrays.exp_avg, state_width) &&
                   agrees(arrays.exp_avg_sq, state_width) && (!arrays.amsgrad || agrees(arrays.largest, state_width)) &&
                   (arrays.master_kind == Master::none || agrees(arrays.master, width_of(arrays.master_kind)));
  return all ? first : kPack;
}

// A kind of row that the compiler knows: its loops ask for no dtype.
template <Dtype param, Dtype grad, Dtype state, Master master>
struct Known {
  static constexpr bool in_packs = true;
  static constexpr int singles = 4;
  static __device__ bool is_of(const Arrays& arrays) {
    return arrays.param_dtype == param && arrays.grad_dtype == grad && arrays.state_dtype == state &&
           arrays.master_kind == master && !arrays.amsgrad;
  }
  static __device__ Arrays known(Arrays arrays) {
    arrays.param_dtype = param;
    arrays.grad_dtype = grad;
    arrays.state_dtype = state;
    arrays.master_kind = master;
    arrays.amsgrad = false;
    return arrays;
  }
};

using Fp32Rows = Known<Dtype::f32, Dtype::f32, Dtype::f32, Master::none>;
using SplitRows = Known<Dtype::b16, Dtype::b16, Dtype::f32, Master::split>;

// All others. They take single elements: packs of an unknown width would need twice the registers.
struct Unknown {
  static constexpr bool in_packs = false;
  static constexpr int singles = 2;
  static __device__ bool is_of(const Arrays&) { return true; }
  static __device__ Arrays known(const Arrays& arrays) { return arrays; }
};

// Calls run(kind) with the first that `arrays` are of.
template <class... Kinds, class Run>
__device__ void with_kind(const Arrays& arrays, const Run& run) {
  (void)((Kinds::is_of(arrays) && (run(Kinds{}), true)) || ...);
}

}  // namespace mpk
