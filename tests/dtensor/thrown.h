#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::testing {

// What each of two ranks, which are threads, throws in `body`; "" where it ends. `odd` is rank 1, to be the one that
// has something wrong.
std::vector<std::string> thrown(const std::function<void(const DeviceMesh& mesh, bool odd)>& body);

}  // namespace tessera::testing
