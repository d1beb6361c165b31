#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// The options that groups over all of `mesh_dims` together have: those of each where all have the same, else the world's.
GroupOptions shared_group_options(const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims);

// "cpu" or "cuda". Throws std::invalid_argument in the name of `function` on anything else.
c10::DeviceType parse_device(const char* function, const std::string& device);

}  // namespace tessera
