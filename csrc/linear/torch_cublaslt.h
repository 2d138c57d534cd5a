// Matrix products by cublasLt that end in a bias, a gelu, or both, or in gelu's slope, before they are rounded.
#pragma once

#include "linear/cublaslt_problem.h"

namespace mpk {

namespace cublaslt {

struct Choice {
  Algorithm algorithm{};
  size_t workspace = 0;  // bytes
  std::string refusal;   // or empty
};

inline Choice choose(const Problem& it, Handle handle) {
  const Functions& lt = it.lt;
  Owned<Preference> preference(lt.destroy_preference);
  check(lt.create_preference(preference.to_be_set()), it.op, "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](int attribute, auto value) {
    check(lt.set_of_preference(preference, static_cast<PreferenceAttribute>(attribute), &value, sizeof(value)), it.op,
          "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(kMaxWorkspace, uint64_t{cublas::kWorkspace});
  prefer(kReductionSchemes, kReduceInComputeType);
  for (int each = kAlignmentOfA; each <= kAlignmentOfD; ++each) prefer(each, kAlignment);
  // Not read here, only looked at: how well is it aligned?
  it.point_to(reinterpret_cast<void*>(kAlignment), reinterpret_cast<void*>(kAlignment));
  Proposal proposal{};
  int found = 0;
  check(lt.propose(handle, it.product, it.layout_of_b, it.layout_of_a, it.layout_of_out, it.layout_of_out, preference,
                   1, &proposal, &found),
        it.op, "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0) throw Refusal{"cublasLt finds no algorithm"};
  check(proposal.status, it.op, "what cublasLtMatmulAlgoGetHeuristic found");
  return {proposal.algorithm, proposal.workspace, ""};
}

inline void multiply(const Problem& it, Handle handle, const Algorithm& algorithm, void* workspace, size_t bytes,
                     cudaStream_t stream) {
  const float one = 1, zero = 0;
  it.point_to(it.ending.bias ? it.ending.bias->data : nullptr, it.ending.z ? it.ending.z->data : nullptr);
  check(
      it.lt.multiply(handle, it.product, &one, it.b.data, it.layout_of_b, it.a.data, it.layout_of_a, &zero, it.out.data,
                     it.layout_of_out, it.out.data, it.layout_of_out, &algorithm, workspace, bytes, stream),
      it.op, "cublasLtMatmul");
}

// A handle for each device, which threads share, and its choices. They live as long as the process does.
class Devices {
 public:
  static Devices& of_process() {
    static Devices& it = *new Devices;
    return it;
  }
  std::pair<Handle, Choice> choice_for(const Problem& it, int32_t device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& [handle, choices] = of_device_[device];
    if (!handle) handle = cublas::create_handle(it.op, it.lt.create, "cublasLtCreate");
    const auto key = it.key();
    auto found = choices.find(key);
    if (found == choices.end()) {
      if (choices.size() >= kMostChoices) choices.clear();
      Choice choice;
      try {
        choice = choose(it, handle);
      } catch (const Refusal& refusal) {
        choice.refusal = refusal.why;
      }
      found = choices.emplace(key, std::move(choice)).first;
    }
    return {handle, found->second};
  }
  void refuse(const Problem& it, int32_t device, const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    of_device_[device].choices[it.key()].refusal = why;
  }

 private:
  static constexpr size_t kMostChoices = 4096;  // some 200 bytes each; shapes may be new with every batch

  struct Device {
    Handle handle = nullptr;
    std::map<Problem::Key, Choice> choices;
  };
  std::mutex mutex_;
  std::map<int32_t, Device> of_device_;
};

// Why a gelu is not left to cublasLt on this chip; empty where it is. Others have measured that it runs behind the
// product, as a kernel of its own, on 8.x (llm.c#338, #591), and more slowly than torch's on 12.0 (sglang#34350).
inline std::string find_unfused(const char* op, const Tensor& on_device_of, const Ending& ending) {
  if (ending.gelu == 0) return "";
  const auto capability = [&](auto which) { return attribute_of_device(op, on_device_of, which); };
  const int major = capability(cudaDevAttrComputeCapabilityMajor);
  if (major == 9 || major == 10) return "";
  return "cublasLt ends products in gelu on compute capability 9.x and 10.x alone until others are measured; this is " +
         std::to_string(major) + "." + std::to_string(capability(cudaDevAttrComputeCapabilityMinor));
}

}  // namespace cublaslt

// out = a b with an ending, in 16 bits, summed in fp32 and rounded once; out is contiguous. False where cublasLt can't
// or won't: then nothing is written, and the reason is noted.
inline bool multiply_by_cublaslt(const char* op, const Tensor& on_device_of, cudaStream_t stream, const Matrix& out,
                                 const Matrix& a, const Matrix& b, const cublaslt::Ending& ending) {
  using namespace cublaslt;
  const auto refuse = [](const std::string& why) {
    Notes::of_process().add(why);
    return false;
  };
  if (const char* const misfit = find_misfit(out, a, b, ending)) return refuse(misfit);
  if (const std::string unfused = find_unfused(op, on_device_of, ending); !unfused.empty()) return refuse(unfused);
  try {
    const Problem problem(op, functions(), out, a, b, ending);
    const int32_t device = on_device_of.device().second;
    const auto [handle, choice] = Devices::of_process().choice_for(problem, device);
    if (!choice.refusal.empty()) return refuse(choice.refusal);
    try {
      const Tensor workspace = on_device_of.scratch(choice.workspace);
      multiply(problem, handle, choice.algorithm, workspace.data(), choice.workspace, stream);
    } catch (const Refusal& refusal) {
      Devices::of_process().refuse(problem, device, refusal.why);
      throw;
    }
  } catch (const Refusal& refusal) {
    return refuse(refusal.why);
  }
  Notes::of_process().add_product(op);
  return true;
}

}  // namespace mpk
