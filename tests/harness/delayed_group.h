#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/mesh/world.h"

namespace tessera::testing {

// Imitates a network that is slower than memory: each collective of ranks that are threads takes longer by a given
// delay, during which no core is busy.
struct DelayedOptions {
  // Returns the delay of a collective, given the size of this rank's input in bytes.
  std::function<std::chrono::microseconds(int64_t bytes)> delay = [](int64_t) { return std::chrono::microseconds(0); };
  // Called on the rank's own thread with "all_reduce begins", and with "all_reduce came" when its wait ends.
  std::function<void(const std::string&)> on_event = [](const std::string&) {};
};

// Runs `body` like run_in_process, on ranks that are threads, each with its own World. Barriers and broadcasts are not
// delayed. Rethrows the exception of the lowest rank that failed.
void run_delayed(int64_t size, const DelayedOptions& options,
                 const std::function<void(const std::shared_ptr<World>&)>& body);

}  // namespace tessera::testing
