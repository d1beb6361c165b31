#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera {

// This process's variables without those by which a launcher tells a process its place.
std::map<std::string, std::string> environment_without_launchers();

// The environment of one local rank, as "NAME=value": that of this process without what another launcher may have set,
// then RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TESSERA_STORE = `store_path`, OMP_NUM_THREADS=1 unless it is set
// (the ranks share the machine's cores), then `extra`.
std::vector<std::string> rank_environment(int64_t rank, int64_t size, const std::string& store_path,
                                          const std::map<std::string, std::string>& extra);

}  // namespace tessera
