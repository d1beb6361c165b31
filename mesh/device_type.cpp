#include "tessera/mesh/device_type.h"

#include <stdexcept>

#include <fmt/format.h>

namespace tessera {

c10::DeviceType parse_device(const char* function, const std::string& device) {
  if (device == "cpu") return c10::DeviceType::CPU;
  if (device == "cuda") return c10::DeviceType::CUDA;
  throw std::invalid_argument(
      fmt::format("{}: device '{}' is not supported; use \"cpu\" or \"cuda\"", function, device));
}

}  // namespace tessera
