#pragma once

#include <map>
#include <string>

namespace tessera {

using EnvironmentVariables = std::map<std::string, std::string>;

// Returns the environment variables of this process.
EnvironmentVariables process_environment();

}  // namespace tessera
