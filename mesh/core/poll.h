#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace tessera {

// Calls `done` until it returns true, or until `deadline`: at once, then after 1 ms, and with pauses that grow to 10
// ms. Returns whether it returned true.
template <class Done>
bool poll_until(std::chrono::steady_clock::time_point deadline, const Done& done) {
  constexpr auto kLongest = std::chrono::milliseconds(10);
  for (auto pause = std::chrono::milliseconds(1); !done(); pause = std::min(pause * 2, kLongest)) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace tessera
