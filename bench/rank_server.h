#pragma once

#include <functional>
#include <string>

#include "tessera/mesh/world.h"

namespace tessera::bench {

// Executes a command "WHAT REST" on a rank and returns its answer.
using Doing = std::function<std::string(const std::string& what, const std::string& rest)>;

// Executes the commands that the benchmark sends over `socket`, until that ends. An exception of `doing` becomes the
// answer "error TEXT".
void serve(const std::string& socket, const World& world, const Doing& doing);

}  // namespace tessera::bench
