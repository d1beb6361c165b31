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

// Runs `body` on a thread of its own, for a call that may block for ever, and returns what it returns or throws what it
// throws. Throws LateError if it has not returned within `limit`, or if `give_up`, asked every 200 ms, returns true
// twice in a row: what the call waits for may be on its way. The text begins with `what`. The thread is then left to
// itself until the process ends, so `body` must own, or share, all that it uses.
template <class Body>
auto within(std::chrono::milliseconds limit, const std::string& what, Body body,
            const std::function<bool()>& give_up = {}) {
  using Result = std::invoke_result_t<Body>;
  using Value = std::conditional_t<std::is_void_v<Result>, bool, Result>;
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Value> value;
    std::exception_ptr error;
  };
  const auto state = std::make_shared<State>();
  std::thread([state, body = std::move(body)]() mutable {
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
    const std::lock_guard lock(state->mutex);
    state->value = std::move(value);
    state->error = error;
    state->changed.notify_one();
  }).detach();
  constexpr auto kLook = std::chrono::milliseconds(200);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  bool gave_up = false;
  std::unique_lock lock(state->mutex);
  const auto done = [&] { return state->value.has_value() || state->error != nullptr; };
  while (!state->changed.wait_until(lock, std::min(deadline, std::chrono::steady_clock::now() + kLook), done)) {
    if (std::chrono::steady_clock::now() >= deadline) {
      throw LateError(fmt::format("{} timed out after {} ms", what, limit.count()));
    }
    if (!give_up) continue;
    lock.unlock();
    const bool gives_up = give_up();
    lock.lock();
    if (gives_up && gave_up && !done()) throw LateError(fmt::format("{} was given up: the job has failed", what));
    gave_up = gives_up;
  }
  if (state->error) std::rethrow_exception(state->error);
  if constexpr (!std::is_void_v<Result>) return std::move(*state->value);
}

}  // namespace tessera
