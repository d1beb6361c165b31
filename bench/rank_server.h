#pragma once

#include <functional>
#include <string>

#include "tessera/mesh/world.h"

namespace tessera::bench {

// What a rank does that is told "WHAT REST"; gives its answer.
using Doing = std::function<std::string(const std::string& what, const std::string& rest)>;

// Does what the benchmark says at `socket`, until that ends. What `doing` throws is an answer too: "error TEXT".
void serve(const std::string& socket, const World& world, const Doing& doing);

}  // namespace tessera::bench
