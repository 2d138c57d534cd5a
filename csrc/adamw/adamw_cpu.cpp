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

// What the formula takes, and leaves its results in: whole vectors.
template <class T>
struct Numbers {
  T* param;
  const T* grad;
  T *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
};

// For every lane: else the compiler would spread them anew for each vector, since any store may have changed them.
template <class F, class C>
static MPK_FN AdamwScalars<F> spread(const AdamwScalars<C>& by) {
  const auto lanes = [](C scalar) { return scalar - F{}; };  // a sum would make +0 of -0
  return {lanes(by.grad_factor), lanes(by.decay),     lanes(by.weight1), lanes(by.beta2),
          lanes(by.weight2),     lanes(by.step_size), lanes(by.eps)};
}

template <bool amsgrad, class T, class F>
static MPK_FN void step(const Numbers<T>& numbers, int64_t size, const AdamwScalars<F>& by) {
  const auto [param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq] = numbers;
  for (int64_t i = 0; i < size; i += kLanesOf<T>) {
    AdamwElement<F> element{load(param + i), load(exp_avg + i), load(exp_avg_sq + i), F{}};
    if (amsgrad) element.max_exp_avg_sq = load(max_exp_avg_sq + i);
    element = adamw(element, load(grad + i), amsgrad, by);
    store(param + i, element.param);
    store(exp_avg + i, element.exp_avg);
    store(exp_avg_sq + i, element.exp_avg_sq);
    if (amsgrad) store(max_exp_avg_sq + i, element.max_exp_avg_sq);
  }
}

template <class T, class F>
static void step(const Numbers<T>& numbers, int64_t size, const AdamwScalars<F>& by) {
  numbers.max_exp_avg_sq ? step<true>(numbers, size, by) : step<false>(numbers, size, by);
}

// So many numbers of 16 bits at a time are unpacked, stepped and packed, in three loops. In one loop it is so far from
// a load to its store that a core's window holds but two or three vectors, and waits: 1.3 to 1.5 times as long (Zen 3).
inline constexpr int kUnpacked = 256;

// Calls body(array, i) for each vector, with the array's own type.
template <class Array, class Body>
static MPK_FN void for_each_vector(Dtype dtype, Array* array, int64_t size, const Body& body) {
  const auto run = [&](auto* halves) {
    for (int64_t i = 0; i < size; i += kLanes) body(halves + i, i);
  };
  dtype == Dtype::b16 ? run(reinterpret_cast<bf16*>(array)) : run(reinterpret_cast<fp16*>(array));
}

// Returns the array itself where it holds fp32.
static MPK_FN float* unpack(Dtype dtype, char* array, int64_t size, float* to) {
  if (!array || dtype == Dtype::f32) return reinterpret_cast<float*>(array);
  for_each_vector(dtype, array, size, [&](auto* halves, int64_t i) { store(to + i, load(halves)); });
  return to;
}

static MPK_FN void pack(Dtype dtype, const float* from, int64_t size, char* array) {
  if (!array || dtype == Dtype::f32) return;
  for_each_vector(dtype, array, size, [&](auto* halves, int64_t i) { store(halves, load(from + i)); });
}

static MPK_FN Words join(const bf16* weight, Words remainder) {
  return join_bf16(Split<Words>{widen(load_bytes<Halves>(weight)), remainder});
}
static MPK_FN Words join(const fp16* weight, Words remainder) {
  return join_fp16<Floats>({load_bytes<Halves>(weight), remainder});
}

// Returns the true weights: a master in fp32 where it lies.
static MPK_FN float* unpack_weights(const AdamwRow& row, const Arrays& arrays, int64_t size, float* to) {
  if (row.master_kind == Master::none) return unpack(row.param_dtype, arrays.param, size, to);
  if (row.master_kind == Master::fp32) {
    auto* const masters = reinterpret_cast<float*>(arrays.master);
    for_each_vector(row.param_dtype, arrays.param, size, [&](auto* weight, int64_t i) {
      store(masters + i, copied_master(row.param_dtype, load(masters + i), load(weight)));
    });
    return masters;
  }
  for_each_vector(row.param_dtype, arrays.param, size, [&](auto* weight, int64_t i) {
    store(to + i, bit_cast<Floats>(join(weight, widen(load_bytes<Halves>(arrays.master + 2 * i)))));
  });
  return to;
}

static MPK_FN void split(Words master, bf16* weight, char* remainder) {
  const Split<Words> split = split_bf16(master);
  store_bytes(weight, narrow(split.weight));
  store_bytes(remainder, narrow(split.remainder));
}
static MPK_FN void split(Words master, fp16* weight, char* remainder) {
  const SplitFp16<Floats> split = split_fp16<Floats>(master);
  store_bytes(weight, split.weight);
  store_bytes(remainder, narrow(split.remainder));
}

static MPK_FN void pack_weights(const AdamwRow& row, const float* from, int64_t size, const Arrays& arrays) {
  if (row.master_kind != Master::split) return pack(row.param_dtype, from, size, arrays.param);
  for_each_vector(row.param_dtype, arrays.param, size,
                  [&](auto* weight, int64_t i) { split(load_bytes<Words>(from + i), weight, arrays.master + 2 * i); });
}

static void step_unpacked(const AdamwRow& row, const Arrays& arrays, int64_t size, const AdamwScalars<Floats>& by) {
  alignas(64) float unpacked[5][kUnpacked];
  const auto unpack_state = [&](char* array, float* to) { return unpack(row.state_dtype, array, size, to); };
  const Numbers<float> numbers{unpack_weights(row, arrays, size, unpacked[0]),
                               unpack(row.grad_dtype, const_cast<char*>(arrays.grad), size, unpacked[1]),
                               unpack_state(arrays.exp_avg, unpacked[2]), unpack_state(arrays.exp_avg_sq, unpacked[3]),
                               unpack_state(arrays.max_exp_avg_sq, unpacked[4])};
  step(numbers, size, by);
  pack_weights(row, numbers.param, size, arrays);
  pack(row.state_dtype, numbers.exp_avg, size, arrays.exp_avg);
  pack(row.state_dtype, numbers.exp_avg_sq, size, arrays.exp_avg_sq);
  pack(row.state_dtype, numbers.max_exp_avg_sq, size, arrays.max_exp_avg_sq);
}

static void step(const AdamwRow& row, const Arrays& arrays, int64_t size, const AdamwScalars<Floats>& by) {
  const bool is_fp32 = row.param_dtype == Dtype::f32 && row.grad_dtype == Dtype::f32 && row.state_dtype == Dtype::f32;
  const int64_t block = is_fp32 ? size : kUnpacked;
  for (int64_t i = 0; i < size; i += block) {
    step_unpacked(row, advanced(row, arrays, i), std::min(block, size - i), by);
  }
}

static void step(const AdamwRow&, const Arrays& arrays, int64_t size, const AdamwScalars<Doubles>& by) {
  const auto doubles = [](char* array) { return reinterpret_cast<double*>(array); };
  const Numbers<double> numbers{doubles(arrays.param), doubles(const_cast<char*>(arrays.grad)), doubles(arrays.exp_avg),
                                doubles(arrays.exp_avg_sq), doubles(arrays.max_exp_avg_sq)};
  step(numbers, size, by);
}

// The last, incomplete vector, by way of a copy.
template <class F>
static void step_tail(const AdamwRow& row, const Arrays& arrays, int64_t count, int64_t lanes,
                      const AdamwScalars<F>& by) {
  alignas(64) char copies[6][sizeof(F)]{};
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
  step(row, {copies[0], copies[1], copies[2], arrays.max_exp_avg_sq ? copies[3] : nullptr, copies[4], copies[5]}, lanes,
       by);
  for (int i = 0; i < 5; ++i) {  // all but the grad
    if (sources[i].array) memcpy(sources[i].array, copies[i], count * sources[i].width);
  }
}

template <class F, class C>
static void adamw_arrays(const AdamwRow& row, const Arrays& arrays, int64_t size, const AdamwScalars<C>& scalars) {
  constexpr int64_t lanes = kLanesOf<C>;
  const int64_t whole = size / lanes * lanes;
  const AdamwScalars<F> by = spread<F>(scalars);
  step(row, arrays, whole, by);
  if (whole < size) step_tail(row, advanced(row, arrays, whole), size - whole, lanes, by);
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
