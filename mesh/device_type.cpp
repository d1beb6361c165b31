#include "tessera/mesh/device_type.h"

#include <stdexcept>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "tessera/mesh/backends/nccl_group.h"

namespace tessera {
namespace {

std::optional<c10::DeviceType> type_called(const std::string& name) {
  try {
    const c10::Device device(name);
    return device.has_index() ? std::nullopt : std::optional(device.type());
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

std::string why_none(c10::DeviceType type) {
  const bool is_built = type != c10::DeviceType::CUDA || built_with_nccl();
  return is_built ? "no GPU was found"
                  : "this build is without CUDA: build Tessera with --config=cuda, which is --define=tessera_cuda=true "
                    "in a project of your own";
}

}  // namespace

bool is_mesh_device(c10::DeviceType type) {
  return type == c10::DeviceType::CPU || type == c10::DeviceType::CUDA || type == at::accelerator::getAccelerator();
}

c10::DeviceType parse_device(const char* function, const std::string& device) {
  const std::optional<c10::DeviceType> type = type_called(device);
  if (type && is_mesh_device(*type)) return *type;
  throw std::invalid_argument(
      fmt::format("{}: device '{}' is not supported; use \"cpu\" or \"cuda\"", function, device));
}

int device_index_of(c10::DeviceType type, int64_t rank, int64_t local_rank, std::optional<int> given) {
  const std::string name = c10::DeviceTypeName(type);
  const int64_t count = c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
  if (count == 0) {
    throw std::runtime_error(fmt::format("a mesh on {} was asked for, and rank {} has no {} device ({}); use \"cpu\"",
                                         c10::DeviceTypeName(type, /*lower_case=*/true), rank, name, why_none(type)));
  }
  if (given && (*given < 0 || *given >= count)) {
    throw std::runtime_error(
        fmt::format("rank {} was given {} device {}, and there are {}, counted from 0; give "
                    "WorldOptions::device_index a number below that",
                    rank, name, *given, count));
  }
  if (given) return *given;
  if (count > 1 && local_rank >= count) {
    throw std::runtime_error(fmt::format(
        "rank {} is process {} of its host, counted from 0, and sees {} {} devices; start at most {} processes per "
        "host, let each process see its own device alone (CUDA_VISIBLE_DEVICES), or give WorldOptions::device_index",
        rank, local_rank, count, name, count));
  }
  return count == 1 ? 0 : static_cast<int>(local_rank);
}

bool is_captured(c10::Device device) { return device.is_cuda() && cuda_stream_is_captured(device); }

}  // namespace tessera
