// The arguments of a rule's ops, in the order in which mpkernels/ops/step/arguments.py declares them.
#pragma once

#include "common/chunks_torch.h"
#include "common/registration_torch.h"
#include "common/stream_torch.h"
#include "step/step.h"

namespace mpk {

// Hands out the arguments on a stack, one after the other.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  StableIValue take() { return *next_++; }
  TensorList tensors() { return TensorList(take()); }
  std::vector<TensorList> lists(int count) {
    std::vector<TensorList> all;
    while (count-- > 0) all.push_back(tensors());
    return all;
  }
  std::unique_ptr<Tensor> optional() { return take_optional(take()); }
  template <class T>
  std::vector<T> numbers() {
    return take_numbers<T>(take());
  }

 private:
  const StableIValue* next_;
};

struct WeightArguments {
  explicit WeightArguments(Arguments& arguments) : params(arguments.tensors()), grads(arguments.tensors()) {}

  const TensorList params, grads;
};

}  // namespace mpk
