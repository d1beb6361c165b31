#include "tessera/mesh/core/log.h"

#include <utility>

#include <spdlog/spdlog.h>

#include "tessera/mesh/core/logger.h"

namespace tessera {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return spdlog::level::debug;
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarning: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
  }
  return spdlog::level::info;
}

LogLevel from_spdlog(spdlog::level::level_enum level) {
  if (level >= spdlog::level::err) return LogLevel::kError;
  if (level == spdlog::level::warn) return LogLevel::kWarning;
  return level == spdlog::level::info ? LogLevel::kInfo : LogLevel::kDebug;
}

}  // namespace

void set_log_sink(LogSink sink, LogLevel least) {
  logger().set_level(to_spdlog(least));
  if (!sink) return pass_messages_to({});
  pass_messages_to([sink = std::move(sink)](spdlog::level::level_enum level, const std::string& text) {
    sink(from_spdlog(level), text);
  });
}

}  // namespace tessera
