#pragma once

#include <string>

namespace tessera::testing {

// Returns the type of device on which tests run that know several: what TESSERA_TEST_DEVICE says, or "cpu".
const std::string& device_name();

}  // namespace tessera::testing
