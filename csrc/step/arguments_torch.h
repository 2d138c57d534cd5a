// The arguments of a rule's ops, in the order in which mpkernels/ops/step/schema.py declares them.
#pragma once

#include "common/torch.h"
#include "step/step.h"

namespace mpk {

// Hands out the arguments on a stack, one after the other.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  StableIValue take() { return *next_++; }
  TensorList tensors() { return TensorList(take()); }
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

// What a plan holds from step to step.
template <class Rule>
struct StateArguments {
  explicit StateArguments(Arguments& arguments)
      : states(lists(arguments)),
        masters(arguments.tensors()),
        scales(arguments.tensors()),
        steps(arguments.tensors()),
        group_sizes(arguments.numbers<int64_t>()) {}

  const std::vector<TensorList> states;
  const TensorList masters, scales, steps;
  const std::vector<int64_t> group_sizes;

 private:
  static std::vector<TensorList> lists(Arguments& arguments) {
    std::vector<TensorList> all;
    for (int i = 0; i < Rule::kStates; ++i) all.push_back(arguments.tensors());
    return all;
  }
};

}  // namespace mpk
