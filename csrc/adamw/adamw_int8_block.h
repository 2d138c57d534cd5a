// A CUDA block's step of a span whose moments have 8 bits.
#pragma once

#include "adamw/adamw_elements.h"

namespace mpk {

template <int count, class Decode>
__device__ Elements<float, count> decoded(const Elements<int8_t, count>& codes, const Decode& decode) {
  Elements<float, count> values;
  for (int i = 0; i < count; ++i) values.at[i] = decode(static_cast<float>(codes.at[i]));
  return values;
}

template <int count, class Encode>
__device__ void store_codes(void* array, uint32_t first, const Elements<float, count>& values, const Encode& encode) {
  Elements<int8_t, count> codes;
  for (int i = 0; i < count; ++i) codes.at[i] = static_cast<int8_t>(static_cast<uint8_t>(encode(values.at[i])));
  store(static_cast<int8_t*>(array) + first, codes);
}

// Leaves roots of exp_avg_sq.
template <int count>
__device__ void step_coded(const Arrays& arrays, uint32_t first, const RawElements<count, Elements<int8_t, count>>& raw,
                           const float (&scale)[3], Moments<float, count>& moments, const AdamwScalars<float>& by) {
  const auto decode_sq = [&](int which) {
    return [scale = scale[which]](float q) { return decode_exp_avg_sq(q + 128.0f, scale); };
  };
  moments.exp_avg = decoded(raw.exp_avg, [&](float q) { return decode_exp_avg(q, scale[0]); });
  moments.exp_avg_sq = decoded(raw.exp_avg_sq, decode_sq(1));
  if (arrays.amsgrad) moments.largest = decoded(raw.largest, decode_sq(2));
  step(arrays, first, raw, moments, by);
  for (float& value : moments.exp_avg_sq.at) value = SquareRoot<float>::of(value);
  if (arrays.amsgrad) {
    for (float& value : moments.largest.at) value = SquareRoot<float>::of(value);
  }
}

// A warp takes kQuantized elements from `begin` on, whose moments share their scales: one of each kind, `blocks` apart.
template <int count, int at_once>
__device__ void step_coded(const Arrays& arrays, uint32_t begin, uint32_t size, float* scales, uint32_t blocks,
                           const AdamwScalars<float>& by) {
  constexpr int shares = kQuantized / 32 / count;
  const uint32_t block = begin / kQuantized;
  const auto place = [&](int k) { return begin + (k * 32 + threadIdx.x % 32) * count; };
  const auto is_inside = [&](int k) { return count > 1 || place(k) < size; };
  const int kinds = arrays.amsgrad ? 3 : 2;
  float scale[3]{};
  Moments<float, count> all[shares]{};
#pragma unroll
  for (int first = 0; first < shares; first += at_once) {
    RawElements<count, Elements<int8_t, count>> raw[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const auto load_state = [&](const void* array) {
        return load_once<count>(static_cast<const int8_t*>(array) + place(first + k));
      };
      if (is_inside(first + k)) raw[k] = load_elements<count>(arrays, place(first + k), load_state);
    }
    for (int which = 0; which < kinds; ++which) scale[which] = in_global(scales)[block + which * blocks];
    keep_order<count>();
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      if (is_inside(first + k)) step_coded(arrays, place(first + k), raw[k], scale, all[first + k], by);
    }
  }
  uint32_t largest[3]{};  // bits in place of floats: whole numbers have an instruction for a warp's largest
  for (const Moments<float, count>& moments : all) {
    for (int i = 0; i < count; ++i) {
      largest[0] = larger(largest[0], magnitude(moments.exp_avg.at[i]));
      largest[1] = larger(largest[1], magnitude(moments.exp_avg_sq.at[i]));
      largest[2] = larger(largest[2], magnitude(moments.largest.at[i]));
    }
  }
  float inverse[3]{};
  for (int which = 0; which < kinds; ++which) {
    const uint32_t of_warp = warp_max(largest[which]);  // by now all lanes have read the old scale
    scale[which] = scale_of(bit_cast<float>(of_warp));
    inverse[which] = inverse_of(scale[which]);
    if (threadIdx.x % 32 == 0) in_global(scales)[block + which * blocks] = scale[which];
  }
#pragma unroll
  for (int k = 0; k < shares; ++k) {
    if (!is_inside(k)) continue;
    const auto encode_sq = [&](int which) {
      return [by = inverse[which]](float root) { return encode_exp_avg_sq(root, by); };
    };
    store_codes(arrays.exp_avg, place(k), all[k].exp_avg, [&](float x) { return encode_exp_avg(x, inverse[0]); });
    store_codes(arrays.exp_avg_sq, place(k), all[k].exp_avg_sq, encode_sq(1));
    if (arrays.amsgrad) store_codes(arrays.largest, place(k), all[k].largest, encode_sq(2));
  }
}

// Nothing is peeled: which elements share a scale goes by their place in the row.
static __device__ void step_coded(const Arrays& arrays, uint32_t size, float* scales, uint32_t blocks,
                                  const AdamwScalars<float>& by) {
  constexpr uint32_t round = kThreads / 32 * kQuantized;
  uint32_t i = threadIdx.x / 32 * kQuantized;
  with_kind<Fp32Rows, SplitRows, Unknown>(arrays, [&](auto kind) {
    using Kind = decltype(kind);
    if constexpr (Kind::in_packs) {
      if (head_of(arrays, 1) != 0) return;
      for (; i + kQuantized <= size; i += round)
        step_coded<kPack, kPacks>(Kind::known(arrays), i, size, scales, blocks, by);
    }
  });
  for (; i < size; i += round) step_coded<1, 2>(arrays, i, size, scales, blocks, by);
}

}  // namespace mpk
