#pragma once

#include <functional>
#include <string>

#include <spdlog/logger.h>

namespace tessera {

// Returns the logger of the library, whose name is "tessera". It is never destroyed, so that destructors of static
// objects may log. Its level is the one that spdlog has for that name or for all.
spdlog::logger& logger();

// Passes messages to `to`, one at a time; an empty function stands for the standard error stream.
void pass_messages_to(std::function<void(spdlog::level::level_enum level, const std::string& text)> to);

}  // namespace tessera
