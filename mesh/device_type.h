#pragma once

#include <string>

#include <c10/core/DeviceType.h>

namespace tessera {

// Returns the device type called "cpu" or "cuda". On any other name throws std::invalid_argument, whose text starts
// with `function`.
c10::DeviceType parse_device(const char* function, const std::string& device);

}  // namespace tessera
