#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/backends/backend_group.h"

// Finds out which processes of the MPI job a group's members are. Nothing here calls MPI.
namespace tessera {

// Writes `mine` to the group's store, waits for all members, and returns what all of them wrote, in the order of ranks.
std::vector<std::string> meet_in_store(const GroupRequest& request, const char* what, const std::string& mine);

struct MpiMembers {
  std::vector<int> ranks;   // in MPI_COMM_WORLD, in the group's order
  uint32_t first_made = 0;  // how many groups the first member's process had begun to make, in all of its worlds
};

// Returns the group's members, where this process is `mine` in MPI_COMM_WORLD. Collective over the group, in its store.
// Throws std::runtime_error when they are not different processes of one job.
MpiMembers mpi_members_of(const GroupRequest& request, int mine);

// Returns a tag for MPI_Comm_create_group of the communicator `which`, 0 or 1. Another group that makes a communicator
// at the same time, in this world or another one, nearly always has another tag.
int mpi_group_tag(const MpiMembers& members, int which);

}  // namespace tessera
