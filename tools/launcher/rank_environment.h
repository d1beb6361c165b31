#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera {

// Returns this process's variables without those by which launchers tell a process its rank.
std::map<std::string, std::string> environment_without_launchers();

// Returns the environment of one local rank, as "NAME=value": environment_without_launchers(), then RANK, WORLD_SIZE,
// LOCAL_RANK, LOCAL_WORLD_SIZE, TESSERA_STORE = `store_path`, then `extra`. Unless it is set, OMP_NUM_THREADS is the
// number of cores that this process may use, divided by `size`, and at least 1.
std::vector<std::string> rank_environment(int64_t rank, int64_t size, const std::string& store_path,
                                          const std::map<std::string, std::string>& extra);

}  // namespace tessera
