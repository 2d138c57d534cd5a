#include <algorithm>

#include "adamw/adamw.h"
#include "common/simd.h"

namespace mpk::MPK_ISA {

// A parameter's arrays, from some element on.
struct Arrays {
  char *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;
  const char* grad;
};

static MPK_FN Arrays advanced(const AdamwRow& row, const Arrays& arrays, int64_t elements) {
  const auto at = [&](auto* start, int64_t width) { return start ? start + elements * width : nullptr; };
  const int64_t state_width = width_of(row.state_dtype);
  return {at(arrays.param, width_of(row.param_dtype)),  at(arrays.exp_avg, state_width),
          at(arrays.exp_avg_sq, state_width),           at(arrays.max_exp_avg_sq, state_width),
          at(arrays.master, width_of(row.master_kind)), at(arrays.grad, width_of(row.grad_dtype))};
}

static Arrays arrays_of(const AdamwRow& row) {
  const auto bytes = [](const void* array) { return const_cast<char*>(static_cast<const char*>(array)); };
  return {bytes(row.param),          bytes(row.exp_avg), bytes(row.exp_avg_sq),
          bytes(row.max_exp_avg_sq), bytes(row.master),  bytes(row.grad)};
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
    if (row.master_kind == Master::fp32) {
      return copied_master(row.param_dtype, load_as<F>(Dtype::f32, arrays.master, lane),
                           load_as<F>(row.param_dtype, arrays.param, lane));
    }
    if (row.master_kind == Master::split) {
      const auto weight = load_bytes<Halves>(arrays.param + 2 * lane);
      const Words remainder = widen(load_bytes<Halves>(arrays.master + 2 * lane));
      return bit_cast<F>(row.param_dtype == Dtype::b16 ? join_bf16(Split<Words>{widen(weight), remainder})
                                                       : join_fp16<F>({weight, remainder}));
    }
  }
  return load_as<F>(row.param_dtype, arrays.param, lane);
}

template <class F>
static MPK_FN void store_weight(const AdamwRow& row, const Arrays& arrays, int lane, F weight) {
  if constexpr (std::is_same_v<F, Floats>) {
    if (row.master_kind == Master::split) {
      const Words master = bit_cast<Words>(weight);
      const auto put = [&](Halves param, Words remainder) {
        const Halves low = narrow(remainder);
        memcpy(arrays.param + 2 * lane, &param, sizeof param);
        memcpy(arrays.master + 2 * lane, &low, sizeof low);
      };
      if (row.param_dtype == Dtype::b16) {
        const Split<Words> split = split_bf16(master);
        put(narrow(split.weight), split.remainder);
      } else {
        const SplitFp16<F> split = split_fp16<F>(master);
        put(split.weight, split.remainder);
      }
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
  if (arrays.master) prefetch_block_after(arrays.master, kBlock * width_of(row.master_kind));
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
      {arrays.param, width_of(row.param_dtype)},  {arrays.exp_avg, state_width},
      {arrays.exp_avg_sq, state_width},           {arrays.max_exp_avg_sq, state_width},
      {arrays.master, width_of(row.master_kind)}, {const_cast<char*>(arrays.grad), width_of(row.grad_dtype)}};
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
static MPK_FN void adamw_blocks(const AdamwRow& row, const Arrays& arrays, int64_t size, const AdamwScalars<C>& by) {
  for (int64_t i = 0; i < size; i += kBlock) adamw_block<F>(row, advanced(row, arrays, i), by);
}

// A kind of row that the compiler knows: the loop keeps its constants in registers, and asks for no dtype. Not inlined,
// or GCC 12 forgets what it knows where there are many.
template <Dtype param_and_grad, Dtype state, Master master>
struct Known {
  static bool is(const AdamwRow& row) {
    return row.param_dtype == param_and_grad && row.grad_dtype == param_and_grad && row.state_dtype == state &&
           row.master_kind == master;
  }
  static __attribute__((noinline)) void run(AdamwRow row, const Arrays& arrays, int64_t size,
                                            const AdamwScalars<float>& by) {
    row.param_dtype = row.grad_dtype = param_and_grad;
    row.state_dtype = state;
    row.master_kind = master;
    adamw_blocks<Floats>(row, arrays, size, by);
  }
};

template <class... Kinds>
static bool run_as_known(const AdamwRow& row, const Arrays& arrays, int64_t size, const AdamwScalars<float>& by) {
  return ((Kinds::is(row) && (Kinds::run(row, arrays, size, by), true)) || ...);
}

template <class F, class C>
static void adamw_arrays(const AdamwRow& row, const Arrays& arrays, int64_t size, const AdamwScalars<C>& by) {
  const int64_t whole = size / kBlock * kBlock;
  bool done = false;
  if constexpr (std::is_same_v<F, Floats>) {
    done = run_as_known<Known<Dtype::f32, Dtype::f32, Master::none>, Known<Dtype::f32, Dtype::b16, Master::none>,
                        Known<Dtype::b16, Dtype::f32, Master::split>, Known<Dtype::b16, Dtype::b16, Master::split>,
                        Known<Dtype::f16, Dtype::f32, Master::split>, Known<Dtype::f16, Dtype::b16, Master::split>,
                        Known<Dtype::b16, Dtype::f32, Master::fp32>, Known<Dtype::f16, Dtype::f32, Master::fp32>>(
        row, arrays, whole, by);
  }
  if (!done) adamw_blocks<F>(row, arrays, whole, by);
  if (whole < size) adamw_tail<F>(row, advanced(row, arrays, whole), size - whole, by);
}

// Moments in 8 bits, kQuantized of them or what is left of a span, and the same in fp32.
struct Moments {
  int8_t* codes;  // null where there are none
  float* scale;
  int64_t size;
  alignas(64) float values[kQuantized];

  Moments(int8_t* its_codes, float* its_scale, int64_t its_size) : codes(its_codes), scale(its_scale), size(its_size) {}
  char* bytes() { return codes ? reinterpret_cast<char*>(values) : nullptr; }

  template <class Decode>
  void unpack(const Decode& decode) {
    if (!codes) return;
    int8_t copy[kQuantized];
    const int8_t* whole = codes;
    if (size < kQuantized) {
      memset(copy, 0, sizeof copy);
      memcpy(copy, codes, size);
      whole = copy;
    }
    for (int i = 0; i < kQuantized; i += kLanes) store(values + i, decode(load(whole + i), *scale));
    std::fill(values + size, values + kQuantized, 0.0f);  // even the code of 0 is NaN where the scale is inf
  }

  // Bits in place of floats: whole numbers are compared by one instruction, and NaN is the largest.
  float largest_magnitude() const {
    Words largest{};
    for (int i = 0; i < kQuantized; i += kLanes) {
      const Words magnitude = load_bytes<Words>(values + i) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t of_all = 0;
    for (int lane = 0; lane < kLanes; ++lane) of_all = std::max<uint32_t>(of_all, largest[lane]);
    return bit_cast<float>(of_all);
  }

  template <class Encode>
  void pack(const Encode& encode) {
    if (!codes) return;
    *scale = scale_of(largest_magnitude());
    const float inverse = inverse_of(*scale);
    int8_t copy[kQuantized];
    int8_t* const whole = size < kQuantized ? copy : codes;
    for (int i = 0; i < kQuantized; i += kLanes) store(whole + i, encode(load(values + i), inverse));
    if (size < kQuantized) memcpy(codes, copy, size);
  }

  void take_roots() {
    if (!codes) return;
    for (int i = 0; i < kQuantized; i += kLanes) store(values + i, SquareRoot<Floats>::of(load(values + i)));
  }
};

static void adamw_int8(const AdamwRow& row, const Span& span, const AdamwScalars<float>& by) {
  const int64_t blocks = (row.size + kQuantized - 1) / kQuantized;
  const auto decode = [](Floats q, float scale) { return decode_exp_avg(q, scale); };
  const auto encode = [](Floats value, float inverse) { return encode_exp_avg(value, inverse); };
  const auto decode_sq = [](Floats q, float scale) { return decode_exp_avg_sq(q + 128.0f, scale); };
  const auto encode_sq = [](Floats root, float inverse) { return encode_exp_avg_sq(root, inverse); };
  for (int64_t i = span.begin; i < span.begin + span.size; i += kQuantized) {
    const int64_t size = std::min<int64_t>(kQuantized, span.begin + span.size - i);
    float* const scale = row.scales + i / kQuantized;
    const auto codes = [&](void* start) { return start ? static_cast<int8_t*>(start) + i : nullptr; };
    Moments exp_avg(codes(row.exp_avg), scale, size);
    Moments exp_avg_sq(codes(row.exp_avg_sq), scale + blocks, size);
    Moments largest(codes(row.max_exp_avg_sq), scale + 2 * blocks, size);
    exp_avg.unpack(decode);
    exp_avg_sq.unpack(decode_sq);
    largest.unpack(decode_sq);
    Arrays arrays = advanced(row, arrays_of(row), i);
    arrays.exp_avg = exp_avg.bytes();
    arrays.exp_avg_sq = exp_avg_sq.bytes();
    arrays.max_exp_avg_sq = largest.bytes();
    adamw_arrays<Floats>(row, arrays, size, by);
    exp_avg.pack(encode);
    exp_avg_sq.take_roots();
    exp_avg_sq.pack(encode_sq);
    largest.take_roots();
    largest.pack(encode_sq);
  }
}

void adamw_span(const AdamwRow& row, const Span& span, const AdamwScalars<double>& by) {
  if (row.param_dtype == Dtype::f64) {
    adamw_arrays<Doubles>(row, advanced(row, arrays_of(row), span.begin), span.size, by);
  } else if (row.scales) {
    adamw_int8(row, span, by.rounded<float>());
  } else {
    adamw_arrays<Floats>(row, advanced(row, arrays_of(row), span.begin), span.size, by.rounded<float>());
  }
}

}  // namespace mpk::MPK_ISA
