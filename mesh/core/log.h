#pragma once

#include <functional>
#include <string>

namespace tessera {

// Says how grave a message of the library is.
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Takes a message of the library. Any thread may call it, and never two at once; it must not call the library. Nothing
// that it throws reaches the library. What it uses must be there until the process ends, or another sink is set.
using LogSink = std::function<void(LogLevel level, const std::string& text)>;

// Passes what the library in this process logs to `sink` from now on, but for messages less grave than `least`,
// whatever SPDLOG_LEVEL says. An empty sink stands for the standard error stream, which has the messages before the
// first call.
void set_log_sink(LogSink sink, LogLevel least = LogLevel::kInfo);

}  // namespace tessera
