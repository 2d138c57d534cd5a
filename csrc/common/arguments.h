// Takes a kernel's arguments off torch's stack, and owns them. Lists of tensors become tables of flat memory.
#pragma once

#include <memory>

#include "common/table.h"
#include "common/tensor.h"

namespace mpk {

template <class Row>
int64_t elements_of(const std::vector<Row>& rows) {
  int64_t sum = 0;
  for (const Row& row : rows) sum += row.size;
  return sum;
}

// Divides the rows into chunks of chunk_size elements.
template <class Row>
TableOf<Row> lay_out(std::vector<Row>& rows, int64_t chunk_size) {
  int32_t chunks = 0;
  for (Row& row : rows) {
    row.first_chunk = chunks;
    chunks += chunks_of(row.size, chunk_size);
  }
  return {rows.data(), static_cast<int32_t>(rows.size()), chunks, chunk_size};
}

// Lends a tensor's own memory, or a copy's, so that the elements of several tensors lie in the same order.
class Lender {
 public:
  void* lend(const Tensor& tensor, const Tensor& like, bool will_write) {
    const bool dense = like.is_contiguous() || like.is_dense();
    if (dense && have_same_layout(tensor, like))
      return will_write ? tensor.data() : const_cast<void*>(tensor.const_data());
    const int64_t* const sizes = like.sizes();
    loans_.push_back({&tensor,
                      dense ? like.new_empty(like.ndim(), sizes, like.strides(), tensor.dtype())
                            : like.new_empty(like.ndim(), sizes, tensor.dtype()),
                      will_write});
    loans_.back().copy.copy_from(tensor);
    return loans_.back().copy.data();
  }
  void return_copies() {
    for (Loan& loan : loans_) {
      if (loan.will_write) const_cast<Tensor*>(loan.original)->copy_from(loan.copy);
    }
  }

 private:
  struct Loan {
    const Tensor* original;
    Tensor copy;
    bool will_write;
  };
  std::vector<Loan> loans_;
};

inline std::vector<StableIValue> take_list(StableIValue value) {
  const auto list = reinterpret_cast<StableListHandle>(value);
  size_t count = 0;
  require(torch_list_size(list, &count) == 0, "mpkernels", "torch could not read a list");
  std::vector<StableIValue> items(count);
  for (size_t i = 0; i < count; ++i)
    require(torch_list_get_item(list, i, &items[i]) == 0, "mpkernels", "torch could not read a list");
  require(torch_delete_list(list) == 0, "mpkernels", "torch could not free a list");
  return items;
}

// A Tensor[] argument as a table of flat memory. A tensor that is not dense lends a contiguous copy; return_copies()
// writes such copies back.
class TensorList {
 public:
  explicit TensorList(StableIValue value) {
    const std::vector<StableIValue> items = take_list(value);
    tensors_.reserve(items.size());
    for (const StableIValue item : items) tensors_.emplace_back(item);
  }

  const Tensor& front() const {
    require(!tensors_.empty(), "mpkernels", "a list without a tensor has no device");
    return tensors_.front();
  }
  const Tensor& operator[](int32_t i) const { return tensors_[i]; }
  int32_t count() const { return static_cast<int32_t>(tensors_.size()); }
  int64_t elements() const { return elements_; }

  // Checks everything before anything is written; op and name are for the message.
  const std::vector<Row>& flatten(const char* op, const char* name, const Tensor& on_device_of, bool will_write) {
    const auto device = on_device_of.device();
    rows_.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      Row row{nullptr, tensor.size(), 0, Dtype::f32};
      const char* problem = nullptr;
      if (!tensor.is_strided())
        problem = "is not dense";
      else if (tensor.device() != device)
        problem = "is on another device";
      else if (!find_dtype(tensor.dtype(), &row.dtype))
        problem = "is none of fp16, bf16, fp32, fp64";
      else if (will_write && !tensor.is_contiguous() && tensor.is_expanded())
        problem = "has elements that share memory";
      if (problem) require(false, op, std::string(name) + "[" + std::to_string(i) + "] " + problem);
      rows_.push_back(row);
      elements_ += row.size;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) rows_[i].data = lender_.lend(tensors_[i], tensors_[i], will_write);
    return rows_;
  }

  std::vector<Row>& rows() { return rows_; }  // valid after flatten()

  void return_copies() { lender_.return_copies(); }

 private:
  std::vector<Tensor> tensors_;
  Lender lender_;  // its copies refer to their originals in tensors_
  std::vector<Row> rows_;
  int64_t elements_ = 0;
};

inline std::unique_ptr<Tensor> take_optional(StableIValue value) {
  const std::unique_ptr<StableIValue> inner(reinterpret_cast<StableIValue*>(value));
  return inner ? std::make_unique<Tensor>(*inner) : nullptr;
}

inline std::string take_string(StableIValue value) {
  const auto handle = reinterpret_cast<StringHandle>(value);
  const char* text = nullptr;
  require(torch_string_c_str(handle, &text) == 0, "mpkernels", "torch could not read a string");
  std::string copy(text);
  require(torch_delete_string(handle) == 0, "mpkernels", "torch could not free a string");
  return copy;
}

template <class T>
T take_number(StableIValue value) {
  T number;
  memcpy(&number, &value, sizeof(T));
  return number;
}

// Returns a dtype by torch's number; -1 stands for None.
inline int32_t take_optional_dtype(StableIValue value) {
  const std::unique_ptr<StableIValue> inner(reinterpret_cast<StableIValue*>(value));
  return inner ? take_number<int32_t>(*inner) : -1;
}

template <class T>
std::vector<T> take_numbers(StableIValue value) {
  std::vector<T> numbers;
  for (const StableIValue item : take_list(value)) numbers.push_back(take_number<T>(item));
  return numbers;
}

}  // namespace mpk
