#pragma once

#include <chrono>
#include <string>

namespace tessera {

// Ends this process at once, with code 1, after writing `why` to standard error and what its streams hold. Whoever
// reads a stream may have stopped, so writing has a thread of its own and ends after `patience` at the latest.
[[noreturn]] void leave_at_once(const std::string& why, std::chrono::milliseconds patience);

}  // namespace tessera
