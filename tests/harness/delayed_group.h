#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/mesh/world.h"

namespace tessera::testing {

// A slower network than memory: what ranks that are threads send each other takes longer by a stated delay, in which
// nobody is kept busy.
struct DelayedOptions {
  // How much longer a collective takes of so many bytes of this rank's input.
  std::function<std::chrono::microseconds(int64_t bytes)> delay = [](int64_t) { return std::chrono::microseconds(0); };
  // Told on a rank's own thread: "all_reduce begins", and when it has been waited for "all_reduce came".
  std::function<void(const std::string&)> on_event = [](const std::string&) {};
};

// As run_in_process: `body` on ranks that are threads, each with a World of its own. A barrier and a broadcast are not
// delayed. Rethrows what a rank threw that fails first in the order of ranks.
void run_delayed(int64_t size, const DelayedOptions& options,
                 const std::function<void(const std::shared_ptr<World>&)>& body);

}  // namespace tessera::testing
