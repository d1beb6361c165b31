#pragma once

#include <chrono>
#include <compare>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// How one process group differs from the others of its world.
struct GroupOptions {
  std::optional<std::chrono::milliseconds> timeout = {};  // for everything that waits in it; else the world's
  std::string backend = {};                               // "gloo" on cpu, "nccl" on cuda; empty: the device's own

  friend auto operator<=>(const GroupOptions&, const GroupOptions&) = default;
};

// The options of a group that spans several mesh dimensions, whose own options are `of_dims`: theirs where all are
// equal, else the world's. `of_dims` must not be empty.
GroupOptions shared_group_options(const std::vector<GroupOptions>& of_dims);

}  // namespace tessera
