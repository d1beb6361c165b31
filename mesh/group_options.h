#pragma once

#include <chrono>
#include <compare>
#include <optional>
#include <string>

namespace tessera {

// How one process group differs from the others of its world.
struct GroupOptions {
  std::optional<std::chrono::milliseconds> timeout = {};  // for everything that waits in it; else the world's
  std::string backend = {};                               // "gloo" on cpu, "nccl" on cuda; empty: the device's own

  friend auto operator<=>(const GroupOptions&, const GroupOptions&) = default;
};

}  // namespace tessera
