#include "adamw.h"
#include "common/simd.h"

namespace mpk::MPK_ISA {

// A parameter's arrays, from some element on.
struct Arrays {
  char *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;
  const char* grad;
};

static int64_t master_width(const AdamwRow& row) { return row.master_kind == Master::split ? 2 : 4; }

static Arrays arrays_at(const AdamwRow& row, int64_t element) {
  const auto at = [&](const void* start, int64_t width) {
    return start ? const_cast<char*>(static_cast<const char*>(start)) + element * width : nullptr;
  };
  const int64_t state_width = width_of(row.state_dtype);
  return {at(row.param, width_of(row.param_dtype)), at(row.exp_avg, state_width),
          at(row.exp_avg_sq, state_width),          at(row.max_exp_avg_sq, state_width),
          at(row.master, master_width(row)),        at(row.grad, width_of(row.grad_dtype))};
}

template <class F>
static MPK_FN F load_as(Dtype dtype, const char* array, int lane) {
  if constexpr (std::is_same_v<F, Doubles>) {
    return load(reinterpret_cast<const double*>(array) + lane);
  } else {
    if (dtype == Dtype::f32) return load(reinterpret_cast<const float*>(array) + lane);
    if (dtype == Dtype::b16) return load(reinterpret_cast<const bf16*>(array) + lane);
    return load(reinterpret_cast<const fp16*>(array) + lane);
  }
}

template <class F>
static MPK_FN void store_as(Dtype dtype, char* array, int lane, F x) {
  if constexpr (std::is_same_v<F, Doubles>) {
    store(reinterpret_cast<double*>(array) + lane, x);
  } else {
    if (dtype == Dtype::f32) return store(reinterpret_cast<float*>(array) + lane, x);
    if (dtype == Dtype::b16) return store(reinterpret_cast<bf16*>(array) + lane, x);
    store(reinterpret_cast<fp16*>(array) + lane, x);
  }
}

template <class F>
static MPK_FN F load_weight(const AdamwRow& row, const Arrays& arrays, int lane) {
  if constexpr (std::is_same_v<F, Floats>) {
    if (row.master_kind == Master::fp32) return load_as<F>(Dtype::f32, arrays.master, lane);
    if (row.master_kind == Master::split) {
      const Split<Words> split{widen(load_bytes<Halves>(arrays.param + 2 * lane)),
                               widen(load_bytes<Halves>(arrays.master + 2 * lane))};
      return bit_cast<F>(row.param_dtype == Dtype::b16 ? join_bf16(split) : join_fp16<F>(split));
    }
  }
  return load_as<F>(row.param_dtype, arrays.param, lane);
}

template <class F>
static MPK_FN void store_weight(const AdamwRow& row, const Arrays& arrays, int lane, F weight) {
  if constexpr (std::is_same_v<F, Floats>) {
    if (row.master_kind == Master::split) {
      const Words master = bit_cast<Words>(weight);
      const Split<Words> split = row.param_dtype == Dtype::b16 ? split_bf16(master) : split_fp16<F>(master);
      const Halves param = narrow(split.weight), remainder = narrow(split.remainder);
      memcpy(arrays.param + 2 * lane, &param, sizeof param);
      memcpy(arrays.master + 2 * lane, &remainder, sizeof remainder);
      return;
    }
    if (row.master_kind == Master::fp32) store_as<F>(Dtype::f32, arrays.master, lane, weight);
  }
  store_as<F>(row.param_dtype, arrays.param, lane, weight);
}

template <class F, class C>
static MPK_FN void adamw_block(const AdamwRow& row, const Arrays& arrays, const AdamwScalars<C>& by) {
  const bool amsgrad = arrays.max_exp_avg_sq != nullptr;
  prefetch_block_after(arrays.param, kBlock * width_of(row.param_dtype));
  prefetch_block_after(arrays.grad, kBlock * width_of(row.grad_dtype));
  prefetch_block_after(arrays.exp_avg, kBlock * width_of(row.state_dtype));
  prefetch_block_after(arrays.exp_avg_sq, kBlock * width_of(row.state_dtype));
  if (arrays.master) prefetch_block_after(arrays.master, kBlock * master_width(row));
  for (int lane = 0; lane < kBlock; lane += kLanesOf<C>) {
    AdamwElement<F> element{load_weight<F>(row, arrays, lane), load_as<F>(row.state_dtype, arrays.exp_avg, lane),
                            load_as<F>(row.state_dtype, arrays.exp_avg_sq, lane), F{}};
    if (amsgrad) element.max_exp_avg_sq = load_as<F>(row.state_dtype, arrays.max_exp_avg_sq, lane);
    element = adamw(element, load_as<F>(row.grad_dtype, arrays.grad, lane), amsgrad, by);
    store_weight(row, arrays, lane, element.param);
    store_as(row.state_dtype, arrays.exp_avg, lane, element.exp_avg);
    store_as(row.state_dtype, arrays.exp_avg_sq, lane, element.exp_avg_sq);
    if (amsgrad) store_as(row.state_dtype, arrays.max_exp_avg_sq, lane, element.max_exp_avg_sq);
  }
}

// The last, incomplete block, by way of a copy.
template <class F, class C>
static void adamw_tail(const AdamwRow& row, const Arrays& arrays, int64_t count, const AdamwScalars<C>& by) {
  alignas(64) char copies[6][kBlock * sizeof(double)]{};
  const int64_t state_width = width_of(row.state_dtype);
  const struct {
    char* array;
    int64_t width;
  } sources[6] = {
      {arrays.param, width_of(row.param_dtype)}, {arrays.exp_avg, state_width},
      {arrays.exp_avg_sq, state_width},          {arrays.max_exp_avg_sq, state_width},
      {arrays.master, master_width(row)},        {const_cast<char*>(arrays.grad), width_of(row.grad_dtype)}};
  for (int i = 0; i < 6; ++i) {
    if (sources[i].array) memcpy(copies[i], sources[i].array, count * sources[i].width);
  }
  adamw_block<F>(
      row, {copies[0], copies[1], copies[2], arrays.max_exp_avg_sq ? copies[3] : nullptr, copies[4], copies[5]}, by);
  for (int i = 0; i < 5; ++i) {  // all but the grad
    if (sources[i].array) memcpy(sources[i].array, copies[i], count * sources[i].width);
  }
}

template <class F, class C>
static void adamw_all(const AdamwRow& row, const Span& span, const AdamwGroup& group, const AdamwShared& shared) {
  const AdamwScalars<C> by = adamw_scalars<C>(group, shared, *row.step);
  const int64_t whole = span.begin + span.size / kBlock * kBlock;
  for (int64_t i = span.begin; i < whole; i += kBlock) adamw_block<F>(row, arrays_at(row, i), by);
  const int64_t left = span.begin + span.size - whole;
  if (left > 0) adamw_tail<F>(row, arrays_at(row, whole), left, by);
}

void adamw_span(const AdamwRow& row, const Span& span, const AdamwGroup& group, const AdamwShared& shared) {
  if (row.param_dtype == Dtype::f64) {
    adamw_all<Doubles, double>(row, span, group, shared);
  } else {
    adamw_all<Floats, float>(row, span, group, shared);
  }
}

}  // namespace mpk::MPK_ISA
