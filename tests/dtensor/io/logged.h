#pragma once

#include <string>

#include "tessera/mesh/core/log.h"

namespace tessera {

// Returns what the library logs while `act` runs, one line for each message.
template <typename Act>
std::string logged(const Act& act, LogLevel least = LogLevel::kInfo) {
  struct Ended {
    ~Ended() { set_log_sink({}); }
  };
  std::string text;
  set_log_sink([&](LogLevel, const std::string& message) { text += message + '\n'; }, least);
  const Ended ended;
  act();
  return text;
}

}  // namespace tessera
