#pragma once

#include <memory>
#include <sstream>
#include <string>

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

namespace tessera {

// Returns what spdlog's default logger writes while `act` runs.
template <typename Act>
std::string logged(const Act& act) {
  std::ostringstream out;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(out)));
  act();
  spdlog::set_default_logger(before);
  return out.str();
}

}  // namespace tessera
