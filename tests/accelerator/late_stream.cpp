#include "tessera/tests/accelerator/late_stream.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::testing {

void Flag::set() {
  set_.store(true);
  set_.notify_all();
}

void Flag::wait() const { set_.wait(false); }

// The thread is not joined: a process that ends leaves its streams, like a device.
LateStream::LateStream(uint32_t seed) : random_(seed) {
  std::thread([this] { run(); }).detach();
}

void LateStream::give(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

bool LateStream::is_idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void LateStream::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void LateStream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty(); });
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    // Most work follows at once, so that a stream that has slept falls behind one that has not by more than the time
    // that the host takes to give both the next work.
    if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 2000));
    std::this_thread::sleep_for(least_.load());
    std::exception_ptr error;
    try {
      work();
    } catch (const std::exception& thrown) {
      std::fprintf(stderr, "work on a late stream failed: %s\n", thrown.what());
      error = std::current_exception();
    }
    lock.lock();
    if (!error_) error_ = error;
    busy_ = false;
    changed_.notify_all();
  }
}

LateStream& late_stream(const c10::Stream& stream) {
  static auto* const streams = new std::array<std::array<std::once_flag, kStreams>, kDevices>;
  static auto* const made = new std::array<std::array<LateStream*, kStreams>, kDevices>{};
  const auto device = static_cast<std::size_t>(stream.device_index()), id = static_cast<std::size_t>(stream.id());
  std::call_once((*streams).at(device).at(id),
                 [&] { (*made)[device][id] = new LateStream(static_cast<uint32_t>(1 + device * kStreams + id)); });
  return *(*made)[device][id];
}

LateStream& current_late_stream(c10::Device device) {
  return late_stream(c10::impl::VirtualGuardImpl(kAccelerator).getStream(device));
}

}  // namespace tessera::testing
