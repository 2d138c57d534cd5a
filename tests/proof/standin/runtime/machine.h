// What the parts of the stand-in share. A device is memory, and streams that hold back their work for as long as CUDA
// lets them. All of it is guarded by one lock, also while work is done.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace standin {

constexpr int kMostDevices = 32;
enum class Order { lazy, eager, random };

// Read from the file `settings` beside the library, where the command writes them.
struct Settings {
  Order order;
  int devices = 1, driver = 13020;
  bool peers = true;                // whether a device can be let into another's memory
  bool protects = true;             // whether the host can't read device memory; Triton's interpreter must
  std::vector<int> capabilities;    // of the devices in turn; the last one is that of all others
  size_t memory = size_t{6} << 30;  // of each device
  std::minstd_rand random;
};
Settings& settings();

std::recursive_mutex& machine();
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- errors

[[gnu::format(printf, 1, 2)]] void say(const char* format, ...);
// Returns the error, which cudaGetLastError will give out as well. The reason, if any, goes to stderr.
cudaError_t fail(cudaError_t error, const char* why = "");
cudaError_t outcome();  // success, or what a kernel has failed with: that is the end of all calls

// ---- memory

struct Range {
  size_t bytes;
  cudaMemoryType type;
  int device;
};
using Located = std::map<uintptr_t, Range>::value_type;  // the first address, and the range
const Located* locate(const void* address);
// Whether all of it lies in one allocation, or in no allocation at all.
bool is_within(const void* address, size_t bytes);
void* allocate(int device, size_t bytes);  // null where memory is out
size_t free_bytes(int device);
// For the driver's calls, which choose an address first and give it memory later.
void add_device_memory(void* at, size_t bytes, int device);
void remove_device_memory(void* at, size_t bytes);
bool reserve_bytes(int device, int64_t bytes);  // gives back a negative number; false where memory is out

// While it lives, the memory is open that a device can reach, and that of the other device of a copy.
class Working {
 public:
  explicit Working(int device, int other = -1);
  ~Working();

 private:
  const unsigned before_;
};

// ---- streams

struct Stream;
struct Capture;
using Work = std::function<void()>;
using Clock = std::map<Stream*, uint64_t>;  // of each stream, how much of its work has come before

struct Item {
  Work work;  // or, if it is null, what is waited for:
  Stream* stream = nullptr;
  uint64_t until = 0;
};
struct Stream {
  int device;
  unsigned flags;
  bool is_legacy = false, is_destroyed = false;
  uint64_t enqueued = 0, done = 0;
  int queries = 0;
  std::deque<Item> queue;
  std::shared_ptr<Capture> capture;
  bool is_pending() const { return done < enqueued; }
  bool is_blocking() const { return !is_legacy && !(flags & cudaStreamNonBlocking); }  // waits for the legacy one
};
extern thread_local int current_device;
Stream* find_stream(cudaStream_t handle);  // null for none, or one that is destroyed
cudaError_t enqueue(Stream* stream, Work work);
void wait_for(Stream* stream, Stream* other, uint64_t until);
void finish(Stream* stream, uint64_t until);
void finish_device(int device);
void finish_all();

struct Event {
  unsigned flags;
  Stream* stream = nullptr;  // where it was recorded
  uint64_t until = 0;
  std::shared_ptr<double> milliseconds;
  int queries = 0;
  bool is_captured = false;  // last recorded in a capture, which may be over
  std::weak_ptr<Capture> capture;
  Clock clock;
  bool is_done() const { return !stream || stream->done >= until; }
};

// ---- captures

struct Node {
  Stream* stream;
  Clock before;
  Work work;
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  Stream* origin;
  int thread;
  bool is_void = false;
  std::vector<Node> nodes;
  std::map<Stream*, Clock> clocks;  // of its streams
};
cudaError_t add(Capture& capture, Stream* stream, Work work);
cudaError_t join(Stream* stream, Event* event);    // the stream waits for an event that was recorded in a capture
cudaError_t record(Stream* stream, Event* event);  // in the capture that the stream is in
// Ends captures with which a call can't go on, and says so: calls that CUDA names potentially unsafe, and those that
// wait for a device or touch the legacy stream.
cudaError_t refuse_if_unsafe(const char* function);
cudaError_t refuse_if_captured(int device, const Stream* used = nullptr);  // harmless if `used` isn't the legacy one
cudaError_t void_capture(Capture& capture, cudaError_t error, const char* why);

#define REFUSE_IF_UNSAFE() \
  if (const cudaError_t unsafe = refuse_if_unsafe(__func__)) return unsafe

}  // namespace standin
