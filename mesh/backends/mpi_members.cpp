#include "tessera/mesh/backends/mpi_members.h"

#include <algorithm>
#include <atomic>
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

MpiMembers mpi_members_of(const GroupRequest& request, int mine) {
  static std::atomic<uint32_t> made{0};
  MpiMembers members;
  // Each text is "RANK MADE".
  const std::vector<std::string> texts = meet_in_store(request, "mpi_rank", fmt::format("{} {}", mine, made++));
  for (const std::string& text : texts) members.ranks.push_back(std::stoi(text));
  members.first_made = static_cast<uint32_t>(std::stoul(texts.front().substr(texts.front().find(' '))));
  std::vector<int> sorted = members.ranks;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end()) return members;
  throw std::runtime_error(fmt::format(
      "MPI counts the members of this group as its ranks [{}], which are not {} different processes of one job; "
      "start them with the mpirun of this MPI ({}), or with tools/launch --backend mpi",
      fmt::join(members.ranks, ", "), request.size, mpi_flavor()));
}

int mpi_group_tag(const MpiMembers& members, int which) {
  uint32_t hash = (2166136261U ^ members.first_made) * 16777619U;
  for (const int rank : members.ranks) hash = (hash ^ static_cast<uint32_t>(rank)) * 16777619U;
  return static_cast<int>(hash % 16000U) * 2 + which;
}

}  // namespace tessera
