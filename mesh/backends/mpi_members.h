#pragma once

#include <string>
#include <vector>

#include "tessera/mesh/backends/backend_group.h"

// Finds out which processes of the MPI job a group's members are. Nothing here calls MPI.
namespace tessera {

// Writes `mine` to the group's store, waits for all members, and returns what all of them wrote, in the order of ranks.
std::vector<std::string> meet_in_store(const GroupRequest& request, const char* what, const std::string& mine);

// Returns the members' ranks in MPI_COMM_WORLD, where this process is `mine`. Collective over the group, in its store.
// Throws std::runtime_error when they are not different processes of one job.
std::vector<int> mpi_ranks_of(const GroupRequest& request, int mine);

// Returns a tag for MPI_Comm_create_group of the communicator `which`, 0 or 1, over `ranks`. Another group that makes a
// communicator at the same time has other ranks, so it nearly always has another tag.
int mpi_group_tag(const std::vector<int>& ranks, int which);

}  // namespace tessera
