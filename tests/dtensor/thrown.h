#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::testing {

// Returns what each of two ranks, which are threads, throws in `body`; "" where it returns. `odd` is true on rank 1,
// for tests in which one rank does something wrong.
std::vector<std::string> thrown(const std::function<void(const DeviceMesh& mesh, bool odd)>& body);

}  // namespace tessera::testing
