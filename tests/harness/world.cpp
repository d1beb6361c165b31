#include <memory>

#include "tessera/mesh/world.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera::testing {

const std::shared_ptr<World>& world() {
  rank();  // throws outside a rank
  static const std::shared_ptr<World> only = World::from_environment();
  return only;
}

}  // namespace tessera::testing
