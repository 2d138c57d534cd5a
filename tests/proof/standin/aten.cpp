// aten on the stand-in: torch's CPU kernels compute on the same memory, as work of the current stream. Meta kernels say
// what results look like. If they can't, the host waits, as it does for CUDA's own kernels.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <sstream>

#include "views.h"

extern "C" cudaError_t standin_enqueue(cudaStream_t, void (*work)(void*), void (*drop)(void*), void* context);
extern "C" void standin_kernel_failed(const char* why);

using namespace standin;

namespace {

struct Work {
  std::string name;
  std::function<void()> run;
};
void enqueue(const std::string& name, std::function<void()> run) {
  const auto work = [](void* context) {
    const Work& it = *static_cast<Work*>(context);
    try {
      const OnDevice here;
      it.run();
    } catch (const std::exception& error) {
      standin_kernel_failed((it.name + ": " + error.what()).c_str());
    }
  };
  const auto drop = [](void* context) { delete static_cast<Work*>(context); };
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  C10_CUDA_CHECK(standin_enqueue(stream, work, drop, new Work{name, std::move(run)}));
}

std::string name_of(const c10::OperatorHandle& op) {
  const std::string& overload = op.schema().overload_name();
  return overload.empty() ? op.schema().name() : op.schema().name() + "." + overload;
}

// The seed of a call. CUDA's generator gives each call another offset, which a captured stream reads from memory.
struct Random {
  at::PhiloxCudaState state;
  bool is_argument;
  uint64_t seed() const {
    const uint64_t seed = state.captured_ ? *state.seed_.ptr : state.seed_.val;
    const uint64_t offset = state.captured_ ? *state.offset_.ptr + state.offset_intragraph_ : state.offset_.val;
    return seed * 0x9e3779b97f4a7c15u ^ offset * 0xbf58476d1ce4e5b9u ^ offset >> 7;
  }
};

std::shared_ptr<Random> random_for(const c10::OperatorHandle& op, const Stack& arguments) {
  const std::optional<int> place = op.schema().argumentIndexWithName("generator");
  if (!place && !op.hasTag(at::Tag::nondeterministic_seeded)) return nullptr;
  const bool is_given = place && arguments[*place].isGenerator();
  auto* const generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      is_given ? std::optional(arguments[*place].toGenerator()) : std::nullopt,
      at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return std::make_shared<Random>(Random{generator->philox_cuda_state(4), place.has_value()});
}

// Returns the op, and changes the arguments, so that the CPU's kernel does what only CUDA's can: wider results.
c10::OperatorHandle suit(const c10::OperatorHandle& op, Stack& arguments) {
  const std::string& name = op.schema().name();
  if (const auto place = op.schema().argumentIndexWithName("half_to_float"); place && arguments[*place].toBool()) {
    arguments[0] = arguments[0].toTensor().to(at::kFloat);
    arguments[*place] = false;
  }
  if (name == "aten::native_layer_norm_backward") {  // on CUDA alone, mean and rstd are wider than the input
    const at::Tensor like = arguments[5].isTensor() ? arguments[5].toTensor() : arguments[1].toTensor();
    for (const int i : {3, 4}) arguments[i] = arguments[i].toTensor().to(like.scalar_type());
  }
  const std::string& overload = op.schema().overload_name();
  if (overload != "dtype" && overload != "dtype_out") return op;
  const int place = *op.schema().argumentIndexWithName("out_dtype");  // of products
  for (int i = 0; i < place; ++i)
    arguments[i] = mapped(arguments[i], [&](const at::Tensor& it) { return it.to(arguments[place].toScalarType()); });
  arguments.erase(arguments.begin() + place);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload == "dtype" ? "" : "out");
}

Stack call(const c10::OperatorHandle& op, DispatchKey key, Stack arguments) {
  const c10::OperatorHandle suited = suit(op, arguments);
  suited.redispatchBoxed(DispatchKeySet(key), &arguments);
  return arguments;
}

Stack call_on_cpu(const c10::OperatorHandle& op, Stack arguments, const Random* random) {
  if (!random) return call(op, DispatchKey::CPU, std::move(arguments));
  if (random->is_argument) {
    arguments[*op.schema().argumentIndexWithName("generator")] =
        at::make_generator<at::CPUGeneratorImpl>(random->seed());
    return call(op, DispatchKey::CPU, std::move(arguments));
  }
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  const at::Tensor before = shared.get_state();
  shared.set_current_seed(random->seed());
  Stack results = call(op, DispatchKey::CPU, std::move(arguments));
  shared.set_state(before);
  return results;
}

c10::Device device_of(const c10::OperatorHandle& op, const Stack& arguments) {
  std::optional<c10::Device> device;
  const bool takes_indices = op.schema().name().find("index") != std::string::npos;
  for (const IValue& value : arguments) {
    mapped(value, [&](const at::Tensor& it) {
      if (it.is_cuda() && !device) device = it.device();
      const bool fits = it.is_cuda() ? it.device() == *device : it.dim() == 0 || takes_indices;
      TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, ",
                  device.value_or(c10::Device(c10::kCUDA, 0)), " and ", it.device(), "! (when checking argument in ",
                  name_of(op), ")");
      return it;
    });
    if (value.isDevice() && value.toDevice().has_index() && !device) device = value.toDevice();
  }
  return device.value_or(c10::Device(c10::kCUDA, c10::cuda::current_device()));
}

// For each result: the place of the argument that an op writes in place or to out= and returns, or -1 if it makes a new
// tensor.
std::vector<int> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> all;
  for (const auto& result : schema.returns()) {
    all.push_back(-1);
    const auto* const alias = result.alias_info();
    for (size_t i = 0; alias && alias->isWrite() && i < schema.arguments().size(); ++i) {
      const auto* const other = schema.arguments()[i].alias_info();
      if (other && other->isWrite() && other->beforeSet() == alias->beforeSet()) all.back() = static_cast<int>(i);
    }
  }
  return all;
}

// Returns tensors without memory that look as the results will, or nothing where the Meta kernel can't tell.
std::optional<Stack> ask_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  if (op.schema().name() == "aten::_to_sparse") return std::nullopt;  // its result's size depends on values
  try {
    const OnDevice here;
    Stack on_meta_device = mapped(arguments, c10::kMeta, on_meta);
    if (const auto place = op.schema().argumentIndexWithName("generator")) on_meta_device[*place] = IValue();
    return call(op, DispatchKey::Meta, std::move(on_meta_device));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

Stack compute_now(const c10::OperatorHandle& op, const Stack& on_cpu, const std::shared_ptr<Random>& random) {
  const auto results = std::make_shared<Stack>();
  const auto error = std::make_shared<std::string>();
  enqueue(name_of(op), [=] {
    try {
      *results = call_on_cpu(op, on_cpu, random.get());
    } catch (const std::exception& it) {
      *error = it.what();
    }
  });
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
  TORCH_CHECK(error->empty(), *error);
  return *results;
}

void copy_each(const IValue& to, const IValue& from) {
  if (to.isTensor() && to.toTensor().defined()) to.toTensor().copy_(from.toTensor());
  if (!to.isTensorList()) return;
  const auto targets = to.toTensorVector(), sources = from.toTensorVector();
  for (size_t i = 0; i < targets.size(); ++i)
    if (targets[i].defined()) targets[i].copy_(sources[i]);
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const c10::Device device = device_of(op, arguments);
  const c10::cuda::CUDAGuard guard(device);
  const auto random = random_for(op, arguments);
  const std::vector<int> written = written_arguments(op.schema());
  const bool is_in_place = !op.schema().is_mutable() ? false : op.schema().name().back() == '_';
  Aliases aliases;
  const auto alias = [&](const at::Tensor& it) { return it.is_cuda() ? aliases.of(it) : copy_of(it); };

  // An op that works in place or returns nothing makes no tensor, so there is none to be asked for.
  const auto looks = is_in_place || written.empty() ? arguments : ask_meta(op, arguments);
  const Stack known = looks ? *looks : compute_now(op, mapped(arguments, c10::kCPU, alias), random);
  Stack results, targets;
  for (size_t i = 0; i < written.size(); ++i) {
    const bool is_made = written[i] < 0;
    results.push_back(!is_made ? arguments[written[i]] : mapped(known[i], [&](const at::Tensor& it) {
      return looks ? at::empty_strided(it.sizes(), it.strides(), at::device(device).dtype(it.dtype())) : it.to(device);
    }));
    targets.push_back(is_made && looks ? mapped(results.back(), alias) : IValue());
    if (is_made || is_in_place || !results.back().isTensor()) continue;
    const at::Tensor &out = results.back().toTensor(), shape = known[i].toTensor();
    if (out.sizes() != shape.sizes()) out.resize_(shape.sizes());
  }
  if (looks) {
    aliases = {};  // storages may have grown
    enqueue(name_of(op), [=, on_cpu = mapped(arguments, c10::kCPU, alias)] {
      const Stack made = call_on_cpu(op, on_cpu, random.get());
      for (size_t i = 0; i < targets.size(); ++i) copy_each(targets[i], made[i]);
    });
  }
  torch::jit::drop(*stack, count);
  for (IValue& it : results) stack->push_back(std::move(it));
}

// Copies that are a memcpy, and those between devices or with the host, are torch's own.
at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  const bool is_memcpy = self.sizes() == from.sizes() && self.dtype() == from.dtype() && !self.is_conj() &&
                         !from.is_conj() && self.is_neg() == from.is_neg() && self.strides() == from.strides() &&
                         self.is_non_overlapping_and_dense();
  if (self.device() != from.device() || is_memcpy || self.numel() == 0 || self.is_same(from))
    return at::native::copy_(self, from, non_blocking);
  const c10::cuda::CUDAGuard guard(self.device());
  at::assert_no_internal_overlap(self);
  at::assert_no_partial_overlap(self, from);
  TORCH_CHECK(at::infer_size(self.sizes(), from.sizes()) == self.sizes().vec(), "The size of tensor a (", self.sizes(),
              ") must match the size of tensor b (", from.sizes(), ")");
  Aliases aliases;
  enqueue("aten::copy_", [to = aliases.of(self), source = aliases.of(from)] { to.copy_(source); });
  return self;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}  // torch warns that its own kernels are replaced
} silent;

}  // namespace

extern "C" __attribute__((visibility("default"))) void standin_attach(const char* names) {
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  std::istringstream words(names);
  for (std::string name; words >> name;)
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  library.impl("copy_", TORCH_FN(copy));
}
