#include "tessera/tests/harness/device_name.h"

#include <cstdlib>

namespace tessera::testing {

const std::string& device_name() {
  static const std::string name = [] {
    const char* const set = std::getenv("TESSERA_TEST_DEVICE");
    return std::string(set == nullptr ? "cpu" : set);
  }();
  return name;
}

}  // namespace tessera::testing
