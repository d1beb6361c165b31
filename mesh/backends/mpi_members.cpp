#include "tessera/mesh/backends/mpi_members.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

std::vector<std::string> meet_in_store(const GroupRequest& request, const char* what, const std::string& mine) {
  const auto key = [&](int rank) { return fmt::format("{}/{}", what, rank); };
  request.store->set(key(request.rank), mine);
  std::vector<std::string> keys;
  for (int rank = 0; rank < request.size; ++rank) keys.push_back(key(rank));
  request.store->wait(keys);
  std::vector<std::string> all;
  for (const std::string& each : keys) all.push_back(request.store->get_to_str(each));
  return all;
}

std::vector<int> mpi_ranks_of(const GroupRequest& request, int mine) {
  std::vector<int> ranks;
  for (const std::string& text : meet_in_store(request, "mpi_rank", std::to_string(mine))) {
    ranks.push_back(std::stoi(text));
  }
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end()) return ranks;
  throw std::runtime_error(fmt::format(
      "MPI counts the members of this group as its ranks [{}], which are not {} different processes of one job; "
      "start them with the mpirun of this MPI ({}), or with tools/launch --backend mpi",
      fmt::join(ranks, ", "), request.size, mpi_flavor()));
}

int mpi_group_tag(const std::vector<int>& ranks, int which) {
  uint32_t hash = 2166136261U;
  for (const int rank : ranks) hash = (hash ^ static_cast<uint32_t>(rank)) * 16777619U;
  return static_cast<int>(hash % 16000U) * 2 + which;
}

}  // namespace tessera
