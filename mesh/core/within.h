#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

namespace tessera {

// A call did not return within its limit.
struct LateError : std::runtime_error {
  using runtime_error::runtime_error;
};

namespace detail {

// Takes what a call on another thread returns or throws.
template <class Result>
class Outcome {
 public:
  template <class Body>
  void take(Body& body) {
    std::optional<Value> value;
    std::exception_ptr error;
    try {
      if constexpr (std::is_void_v<Result>) {
        body();
        value = true;
      } else {
        value.emplace(body());
      }
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    value_ = std::move(value);
    error_ = error;
    changed_.notify_one();
  }

  bool wait_until(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return value_.has_value() || error_ != nullptr; });
  }

  Result get() {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    if constexpr (!std::is_void_v<Result>) return std::move(*value_);
  }

 private:
  using Value = std::conditional_t<std::is_void_v<Result>, bool, Result>;

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::optional<Value> value_;
  std::exception_ptr error_;
};

}  // namespace detail

// Runs `body` on a thread of its own, for a call that may block for ever, and returns what it returns or throws what it
// throws. Throws LateError if it has not returned within `limit`, or if `give_up`, asked every 200 ms, returns true
// twice in a row: what the call waits for may be on its way. The text begins with `what`. The thread is then left to
// itself until the process ends, so `body` must own, or share, all that it uses.
template <class Body>
auto within(std::chrono::milliseconds limit, const std::string& what, Body body,
            const std::function<bool()>& give_up = {}) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLook = std::chrono::milliseconds(200);
  const auto outcome = std::make_shared<detail::Outcome<std::invoke_result_t<Body>>>();
  std::thread([outcome, body = std::move(body)]() mutable { outcome->take(body); }).detach();
  const Clock::time_point deadline = Clock::now() + limit;
  bool gave_up = false;
  while (!outcome->wait_until(std::min(deadline, Clock::now() + kLook))) {
    if (Clock::now() >= deadline) throw LateError(fmt::format("{} timed out after {} ms", what, limit.count()));
    const bool gives_up = give_up && give_up();
    if (gives_up && gave_up) throw LateError(fmt::format("{} was given up: the job has failed", what));
    gave_up = gives_up;
  }
  return outcome->get();
}

}  // namespace tessera
