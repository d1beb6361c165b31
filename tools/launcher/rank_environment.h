#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera {

// Returns this process's variables without those by which launchers tell a process its rank.
std::map<std::string, std::string> environment_without_launchers();

// Returns the environment of one local rank, as "NAME=value": environment_without_launchers(), then RANK, WORLD_SIZE,
// LOCAL_RANK, LOCAL_WORLD_SIZE, TESSERA_STORE = `store_path`, OMP_NUM_THREADS=1 unless it is set (the ranks share the
// machine's cores), then `extra`.
std::vector<std::string> rank_environment(int64_t rank, int64_t size, const std::string& store_path,
                                          const std::map<std::string, std::string>& extra);

}  // namespace tessera
