#include "tessera/tests/dtensor/thrown.h"

#include <exception>
#include <memory>

#include "tessera/mesh/in_process.h"
#include "tessera/tests/harness/device_name.h"

namespace tessera::testing {

std::vector<std::string> thrown(const std::function<void(const DeviceMesh& mesh, bool odd)>& body) {
  std::vector<std::string> texts(2);
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2}, {"tp"}, world);
    try {
      body(mesh, world->rank() == 1);
    } catch (const std::exception& error) {
      texts[static_cast<std::size_t>(world->rank())] = error.what();
    }
  });
  return texts;
}

}  // namespace tessera::testing
