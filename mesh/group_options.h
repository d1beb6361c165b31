#pragma once

#include <chrono>
#include <compare>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// Is the longest time limit. A limit that is added to a point in time must not overflow.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::seconds(1'000'000);

// Holds the options in which one process group differs from the others of its world.
struct GroupOptions {
  // Limits each wait in the group; empty: the world's limit.
  std::optional<std::chrono::milliseconds> timeout = {};
  // Is "gloo"; "mpi" in a world over MPI; "nccl" on cuda; empty: the world's own.
  std::string backend = {};

  friend auto operator<=>(const GroupOptions&, const GroupOptions&) = default;
};

// Returns the options of a group over several mesh dimensions, whose own options are `of_dims`: the common one where
// all of them are equal, else the world's. `of_dims` must not be empty.
GroupOptions shared_group_options(const std::vector<GroupOptions>& of_dims);

}  // namespace tessera
