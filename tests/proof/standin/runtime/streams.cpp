// Streams and events. A stream's work is done when the host waits for it, or for what waits for it, and in random order
// now and then before; never sooner than it must be, in lazy order.
#include <chrono>
#include <csignal>
#include <cstdlib>

#include "machine.h"

using namespace standin;

thread_local int standin::current_device = 0;

// Tests set it: at 1 Ctrl-C is pressed while the host waits the next time, at 2 the time after it.
extern "C" {
__attribute__((visibility("default"))) int standin_waits_to_interrupt = 0;
}

namespace {

std::vector<Stream*> streams;  // none is ever deleted: handles of destroyed ones are told apart
std::set<Event*> events;

Stream* make_stream(int device, unsigned flags) { return streams.emplace_back(new Stream{device, flags}); }
Stream* legacy_stream(int device) {
  static std::map<int, Stream*> all;
  Stream*& it = all[device];
  if (!it) it = make_stream(device, 0), it->is_legacy = true;
  return it;
}

double milliseconds() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void take_turns(Stream* stream) {
  constexpr size_t kMost = 20000;  // the host's memory has an end
  auto& random = settings().random;
  if (settings().order == Order::eager || stream->queue.size() > kMost) finish(stream, stream->enqueued);
  if (settings().order != Order::random || random() % 2) return;
  Stream* const any = streams[random() % streams.size()];
  if (any->is_pending()) finish(any, any->done + 1 + random() % (any->enqueued - any->done));
}

Event* find_event(cudaEvent_t handle) {
  auto* const it = reinterpret_cast<Event*>(handle);
  return events.count(it) ? it : nullptr;
}

void interrupt_if_wanted() {
  if (standin_waits_to_interrupt > 0 && --standin_waits_to_interrupt == 0) raise(SIGINT);
}

bool is_asked_often_enough(int& queries) { return ++queries % 4 == 0; }  // who polls gets an answer in the end

cudaError_t refuse_if_captured(Event* event) {
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  if (!event->is_captured) return cudaSuccess;
  if (const auto capture = event->capture.lock()) void_capture(*capture, cudaErrorCapturedEvent, "an event is asked");
  return fail(cudaErrorCapturedEvent);
}
cudaError_t refuse_if_captured(Stream* stream) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture)
    return void_capture(*stream->capture, cudaErrorStreamCaptureUnsupported, "a captured stream is waited for");
  return standin::refuse_if_captured(stream->device, stream);
}

}  // namespace

Stream* standin::find_stream(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy) return legacy_stream(current_device);
  for (Stream* it : streams)
    if (it == reinterpret_cast<Stream*>(handle)) return it->is_destroyed ? nullptr : it;
  return nullptr;
}

void standin::finish(Stream* stream, uint64_t until) {
  if (stream->done >= until) return;
  const Working open(stream->device);
  while (stream->done < until) {
    if (stream->queue.empty()) say("a stream waits for itself"), abort();
    const Item item = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (item.stream) finish(item.stream, item.until);
    if (item.work) item.work();
    ++stream->done;
  }
}
void standin::finish_device(int device) {
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i]->device == device) finish(streams[i], streams[i]->enqueued);
}
void standin::finish_all() {
  for (int device = 0; device < settings().devices; ++device) finish_device(device);
}

void standin::wait_for(Stream* stream, Stream* other, uint64_t until) {
  if (stream == other || other->done >= until) return;
  stream->queue.push_back({nullptr, other, until});
  ++stream->enqueued;
}

cudaError_t standin::enqueue(Stream* stream, Work work) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = outcome()) return error;
  if (stream->capture) return add(*stream->capture, stream, std::move(work));
  if (const cudaError_t error = standin::refuse_if_captured(stream->device, stream)) return error;
  if (stream->is_legacy) {
    for (Stream* each : streams)
      if (each->device == stream->device && each->is_blocking()) wait_for(stream, each, each->enqueued);
  } else if (stream->is_blocking()) {
    wait_for(stream, legacy_stream(stream->device), legacy_stream(stream->device)->enqueued);
  }
  stream->queue.push_back({std::move(work)});
  ++stream->enqueued;
  take_turns(stream);
  return cudaSuccess;
}

// For code that computes in place of a kernel: calls work(context) when the stream comes to it, then drop(context).
API cudaError_t standin_enqueue(cudaStream_t handle, void (*work)(void*), void (*drop)(void*), void* context) {
  const Lock lock(machine());
  const std::shared_ptr<void> kept(context, drop);
  Stream* const stream = find_stream(handle);
  if (stream && stream->device != current_device) return fail(cudaErrorInvalidResourceHandle, "of another device");
  return enqueue(stream, [kept, work] { work(kept.get()); });
}

// ---- streams

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  const Lock lock(machine());
  *stream = reinterpret_cast<cudaStream_t>(make_stream(current_device, flags));
  return outcome();
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Lock lock(machine());
  Stream* const stream = find_stream(handle);
  if (!stream || stream->is_legacy) return fail(cudaErrorInvalidResourceHandle);
  stream->is_destroyed = true;  // its work is done all the same
  return outcome();
}
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Lock lock(machine());
  interrupt_if_wanted();
  Stream* const stream = find_stream(handle);
  if (const cudaError_t error = refuse_if_captured(stream)) return error;
  if (stream->is_legacy) {
    for (size_t i = 0; i < streams.size(); ++i)
      if (streams[i]->device == stream->device && streams[i]->is_blocking()) finish(streams[i], streams[i]->enqueued);
  }
  finish(stream, stream->enqueued);
  return outcome();
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Lock lock(machine());
  Stream* const stream = find_stream(handle);
  if (const cudaError_t error = refuse_if_captured(stream)) return error;
  REFUSE_IF_UNSAFE();
  if (stream->is_pending() && is_asked_often_enough(stream->queries)) finish(stream, stream->enqueued);
  return stream->is_pending() ? fail(cudaErrorNotReady) : outcome();
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t which, unsigned) {
  const Lock lock(machine());
  Stream* const stream = find_stream(handle);
  Event* const event = find_event(which);
  if (!stream || !event) return fail(cudaErrorInvalidResourceHandle);
  if (event->is_captured) return join(stream, event);
  if (!event->stream) return outcome();
  if (stream->capture)
    return void_capture(*stream->capture, cudaErrorStreamCaptureIsolation, "it would wait for what is not captured");
  wait_for(stream, event->stream, event->until);
  return outcome();
}
API cudaError_t cudaDeviceSynchronize() {
  const Lock lock(machine());
  interrupt_if_wanted();
  if (const cudaError_t error = standin::refuse_if_captured(current_device)) return error;
  finish_device(current_device);
  return outcome();
}

// ---- events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Lock lock(machine());
  *event = reinterpret_cast<cudaEvent_t>(*events.insert(new Event{flags}).first);
  return outcome();
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t which) {
  const Lock lock(machine());
  Event* const event = find_event(which);
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  events.erase(event);
  delete event;
  return outcome();
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t which, cudaStream_t handle, unsigned flags) {
  const Lock lock(machine());
  Event* const event = find_event(which);
  Stream* const stream = find_stream(handle);
  if (!event || !stream) return fail(cudaErrorInvalidResourceHandle);
  if (flags) return fail(cudaErrorNotSupported, "an event as a node of a graph");
  if (stream->capture) return record(stream, event);
  const auto time = std::make_shared<double>();
  const cudaError_t error = enqueue(stream, [time] { *time = milliseconds(); });
  if (error == cudaSuccess) *event = {event->flags, stream, stream->enqueued, time};
  return error;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t which) {
  const Lock lock(machine());
  Event* const event = find_event(which);
  if (const cudaError_t error = refuse_if_captured(event)) return error;
  REFUSE_IF_UNSAFE();
  if (!event->is_done() && is_asked_often_enough(event->queries)) finish(event->stream, event->until);
  return event->is_done() ? outcome() : fail(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t which) {
  const Lock lock(machine());
  interrupt_if_wanted();
  Event* const event = find_event(which);
  if (const cudaError_t error = refuse_if_captured(event)) return error;
  REFUSE_IF_UNSAFE();
  if (event->stream) finish(event->stream, event->until);
  return outcome();
}
API cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t from, cudaEvent_t to) {
  const Lock lock(machine());
  Event *const first = find_event(from), *const last = find_event(to);
  if (!first || !last || !first->milliseconds || !last->milliseconds ||
      (first->flags | last->flags) & cudaEventDisableTiming)
    return fail(cudaErrorInvalidResourceHandle);
  if (!first->is_done() || !last->is_done()) return fail(cudaErrorNotReady);
  *elapsed = static_cast<float>(*last->milliseconds - *first->milliseconds);
  return outcome();
}
