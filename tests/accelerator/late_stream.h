#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <random>

#include <c10/core/Stream.h>

namespace tessera::testing {

// Is set once, by the stream that reaches it.
class Flag {
 public:
  void set();
  bool is_set() const { return set_.load(); }
  void wait() const;

 private:
  std::atomic<bool> set_{false};
};

// A queue of work that a thread of its own carries out in order, and late: it sleeps before some of the work, by random
// numbers from a seed. Any thread may give it work.
class LateStream {
 public:
  explicit LateStream(uint32_t seed);
  LateStream(const LateStream&) = delete;
  LateStream& operator=(const LateStream&) = delete;

  void give(std::function<void()> work);
  bool is_idle() const;
  // Waits for all work that has been given, and throws the first error of any work since the last drain.
  void drain();
  // From now on each piece of work takes at least this long.
  void take_at_least(std::chrono::microseconds time) { least_ = time; }

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  std::atomic<std::chrono::microseconds> least_{std::chrono::microseconds(0)};
  std::exception_ptr error_;
  std::mt19937 random_;  // only the thread uses it
};

// Two devices, each with one default stream and a pool of others.
inline constexpr c10::DeviceType kAccelerator = c10::DeviceType::PrivateUse1;
inline constexpr int kDevices = 2;
inline constexpr int kStreams = 9;

// Returns the queue of a stream of the accelerator. It lives as long as the process.
LateStream& late_stream(const c10::Stream& stream);
// Returns that of the calling thread's current stream.
LateStream& current_late_stream(c10::Device device);

}  // namespace tessera::testing
