// cublasLt's descriptors, and the rules for what they say.
#pragma once

#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "blas.h"
#include "runtime.h"

extern "C" int emulation_cublaslt_failure, emulation_cublaslt_descriptors;

namespace emulation {

enum { tanh_gelu = 32, relu = 2, adds_bias = 4, slope_of_gelu = 64, has_aux = 128 };

// Descriptors are found by their addresses, so that one that is destroyed, or of another kind, is not used.
inline std::mutex& descriptors() {
  static std::mutex it;
  return it;
}
template <class T>
std::set<T*>& living() {
  static std::set<T*> all;
  return all;
}
template <class T>
int create(T** it, T value) {
  if (fails_on_demand()) return emulation_cublaslt_failure;
  const std::lock_guard<std::mutex> lock(descriptors());
  living<T>().insert(*it = new T(value));
  ++emulation_cublaslt_descriptors;
  return success;
}
template <class T>
int destroy(T* it) {
  const std::lock_guard<std::mutex> lock(descriptors());
  if (living<T>().erase(it) == 0) return invalid_value;
  delete it;
  --emulation_cublaslt_descriptors;
  return fails_on_demand() ? emulation_cublaslt_failure : success;
}
template <class... T>
bool live(T*... each) {
  const std::lock_guard<std::mutex> lock(descriptors());
  return (living<T>().count(each) && ...);
}

// Values of attributes, by number: each of a size that is known, the rest unknown.
struct Attributes {
  std::map<int, std::pair<size_t, uint64_t>> values;  // size, value
  int set(int attribute, const void* value, size_t bytes) {
    const auto found = values.find(attribute);
    if (found == values.end() || !value || found->second.first != bytes) return invalid_value;
    memcpy(&(found->second.second = 0), value, bytes);
    return success;
  }
  uint64_t operator[](int attribute) const { return values.at(attribute).second; }
  template <class T>
  T* pointer(int attribute) const {
    return reinterpret_cast<T*>((*this)[attribute]);
  }
};

struct Product : Attributes {};
struct Preference : Attributes {};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t ld;
};
enum { trans_a = 3, trans_b, epilogue = 7, bias_pointer, aux_pointer = 11, aux_ld };
enum { workspace_bytes = 1, reduction = 3, alignment_a = 5, alignment_b, alignment_c, alignment_d };

inline uint64_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return address & -address;
}

// Everything but pointers: an algorithm serves no other.
inline uint64_t problem_of(const Product& it, const Layout& a, const Layout& b, const Layout& d) {
  uint64_t hash = 14695981039346656037u;
  const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  for (const int each : {int{trans_a}, int{trans_b}, int{epilogue}, int{aux_ld}}) add(it[each]);
  for (const Layout* each : {&a, &b, &d}) {
    for (const uint64_t value : {uint64_t(each->type), each->rows, each->columns, uint64_t(each->ld)}) add(value);
  }
  return hash;
}

// Whether shapes, types and the epilogue's own rules hold.
inline bool is_valid(const Product& it, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const uint64_t last = it[epilogue];
  const uint64_t k = it[trans_a] ? a.rows : a.columns;
  if (it[trans_a] > 1 || it[trans_b] > 1 || (it[trans_a] ? a.columns : a.rows) != d.rows ||
      (it[trans_b] ? b.rows : b.columns) != d.columns || (it[trans_b] ? b.columns : b.rows) != k || k == 0 ||
      d.rows == 0 || d.columns == 0 || c.type != d.type || c.rows != d.rows || c.columns != d.columns || c.ld != d.ld)
    return false;
  if (a.type != b.type || (d.type != a.type && d.type != 0)) return false;
  if ((last & adds_bias) && it[bias_pointer] == 0) return false;
  if (!(last & has_aux)) return true;
  return it[aux_pointer] != 0 && it[aux_pointer] % 16 == 0 && it[aux_ld] % 8 == 0 && it[aux_ld] >= d.rows;
}
inline bool is_supported(uint64_t last) {
  static const std::set<uint64_t> known = {1,
                                           relu,
                                           adds_bias,
                                           relu + adds_bias,
                                           tanh_gelu,
                                           tanh_gelu + adds_bias,
                                           tanh_gelu + has_aux,
                                           tanh_gelu + has_aux + adds_bias,
                                           slope_of_gelu + has_aux};
  return known.count(last) != 0;
}

}  // namespace emulation
