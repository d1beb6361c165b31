#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Saves the values of `tensors` as save_tensors does those that its function returns.
inline void save_tensors(const std::vector<SavedTensor>& tensors, const std::vector<DeviceMesh>& meshes,
                         const std::string& path, int64_t max_shard_bytes,
                         const std::map<std::string, std::string>& metadata, const char* op) {
  save_tensors([&] { return SavedContents{tensors, metadata}; }, meshes, path, max_shard_bytes, op);
}

}  // namespace tessera
