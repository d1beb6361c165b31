#pragma once

#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera::testing {

// Returns all ranks of this test's world as a mesh of one dimension, called tp.
inline DeviceMesh tp_line() { return init_device_mesh(device_name(), {world_size()}, {"tp"}, world()); }

}  // namespace tessera::testing
