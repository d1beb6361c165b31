#pragma once

#include <string>

#include <c10/core/DeviceType.h>

namespace tessera {

// The type that "cpu" or "cuda" names. Throws std::invalid_argument in the name of `function` on anything else.
c10::DeviceType parse_device(const char* function, const std::string& device);

}  // namespace tessera
