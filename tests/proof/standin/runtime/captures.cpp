// Captures and graphs. What a call forbids ends the capture, as CUDA documents it for the capture's mode, its thread
// and the thread that calls.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "machine.h"

using namespace standin;

namespace {

std::vector<std::shared_ptr<Capture>> captures;  // under way
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

struct Graph {
  std::shared_ptr<const Capture> capture;
};

bool forbids_unsafe_calls(const Capture& it) {
  const bool is_own = it.thread == gettid();
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  if (is_own) return it.mode != cudaStreamCaptureModeRelaxed;
  return thread_mode == cudaStreamCaptureModeGlobal && it.mode == cudaStreamCaptureModeGlobal;
}

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, until] : other) into[stream] = std::max(into[stream], until);
}

// CUDA doesn't say which of a graph's branches runs first. Here the branch of the stream where the capture began runs
// first, and the others as late as they may; in random order, any branch does.
class Replay {
 public:
  explicit Replay(const Capture& capture) : capture_(capture), is_done_(capture.nodes.size()) {
    for (size_t i = 0; i < capture.nodes.size(); ++i) places_[capture.nodes[i].stream].push_back(i);
  }
  void run() {
    std::vector<size_t> wanted = places_[capture_.origin];
    for (size_t i = capture_.nodes.size(); i-- > 0;) wanted.push_back(i);
    if (settings().order == Order::random) std::shuffle(wanted.begin(), wanted.end(), settings().random);
    for (const size_t each : wanted) run(each);
  }

 private:
  void run(size_t i) {
    if (is_done_[i]) return;
    const Node& node = capture_.nodes[i];
    for (const auto& [stream, until] : node.before) {
      const std::vector<size_t>& nodes = places_[stream];
      for (uint64_t each = 0; each < until; ++each) run(nodes[each]);
    }
    is_done_[i] = true;
    const Working open(node.stream->device);
    node.work();
  }
  const Capture& capture_;
  std::vector<bool> is_done_;
  std::map<Stream*, std::vector<size_t>> places_;
};

}  // namespace

cudaError_t standin::void_capture(Capture& capture, cudaError_t error, const char* why) {
  capture.is_void = true;
  return fail(error, why);
}

cudaError_t standin::refuse_if_unsafe(const char* function) {
  cudaError_t error = cudaSuccess;
  for (const auto& it : captures)
    if (forbids_unsafe_calls(*it)) error = void_capture(*it, cudaErrorStreamCaptureUnsupported, function);
  return error;
}

cudaError_t standin::refuse_if_captured(int device, const Stream* legacy) {
  cudaError_t result = cudaSuccess;
  const cudaError_t error = legacy ? cudaErrorStreamCaptureImplicit : cudaErrorStreamCaptureUnsupported;
  for (const auto& it : captures)
    for (const auto& [stream, _] : it->clocks)
      if (stream->device == device && (!legacy || (legacy->is_legacy && stream->is_blocking())))
        result = void_capture(*it, error, "the device or its legacy stream is used meanwhile");
  return result;
}

cudaError_t standin::add(Capture& capture, Stream* stream, Work work) {
  if (capture.is_void) return fail(cudaErrorStreamCaptureInvalidated);
  Clock& clock = capture.clocks[stream];
  capture.nodes.push_back({stream, clock, std::move(work)});
  ++clock[stream];
  return cudaSuccess;
}

cudaError_t standin::record(Stream* stream, Event* event) {
  if (stream->capture->is_void) return fail(cudaErrorStreamCaptureInvalidated);
  *event = {event->flags};
  event->is_captured = true;
  event->capture = stream->capture;
  event->clock = stream->capture->clocks[stream];
  return cudaSuccess;
}

cudaError_t standin::join(Stream* stream, Event* event) {
  const auto capture = event->capture.lock();
  if (std::find(captures.begin(), captures.end(), capture) == captures.end())
    return fail(cudaErrorCapturedEvent, "of a capture that is over");
  if (capture->is_void) return fail(cudaErrorStreamCaptureInvalidated);
  if (stream->capture && stream->capture != capture) {
    stream->capture->is_void = true;
    return void_capture(*capture, cudaErrorStreamCaptureMerge, "two captures would merge");
  }
  if (stream->is_legacy)
    return void_capture(*capture, cudaErrorStreamCaptureImplicit, "the legacy stream waits for what is captured");
  stream->capture = capture;
  merge(capture->clocks[stream], event->clock);
  return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Lock lock(machine());
  Stream* const stream = find_stream(handle);
  if (!stream || stream->is_legacy) return fail(cudaErrorStreamCaptureUnsupported, "of the legacy stream");
  if (stream->capture) return fail(cudaErrorIllegalState, "the stream is captured already");
  static unsigned long long last_id = 0;
  stream->capture = std::make_shared<Capture>(Capture{++last_id, mode, stream, gettid()});
  stream->capture->clocks[stream];
  captures.push_back(stream->capture);
  return outcome();
}
API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Lock lock(machine());
  *graph = nullptr;
  Stream* const stream = find_stream(handle);
  if (!stream || !stream->capture) return fail(cudaErrorIllegalState, "the stream is not captured");
  const auto capture = stream->capture;
  if (capture->origin != stream) return void_capture(*capture, cudaErrorStreamCaptureUnmatched, "");
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != gettid())
    return fail(cudaErrorStreamCaptureWrongThread);
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  bool is_joined = true;
  Clock& known = capture->clocks[stream];
  for (auto& [each, clock] : capture->clocks) {
    each->capture = nullptr;
    is_joined &= known[each] >= clock[each];
  }
  if (capture->is_void) return fail(cudaErrorStreamCaptureInvalidated);
  if (!is_joined) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{capture});
  return outcome();
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  const Lock lock(machine());
  const Stream* const stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = refuse_if_captured(stream->device, stream)) return error;
  Capture* const it = stream->capture.get();
  const cudaStreamCaptureStatus active[] = {cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated};
  *status = it ? active[it->is_void] : cudaStreamCaptureStatusNone;
  if (id) *id = it ? it->id : 0;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(it);
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return outcome();
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = reinterpret_cast<Graph*>(graph)->capture->nodes.size(), outcome();
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return outcome();
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const Lock lock(machine());
  return enqueue(find_stream(stream),
                 [capture = reinterpret_cast<Graph*>(executable)->capture] { Replay(*capture).run(); });
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Lock lock(machine());
  delete reinterpret_cast<Graph*>(graph);
  return outcome();
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t it) { return cudaGraphDestroy(reinterpret_cast<cudaGraph_t>(it)); }
