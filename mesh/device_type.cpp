#include "tessera/mesh/device_type.h"

#include <stdexcept>

#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>

#include "tessera/mesh/backends/nccl_group.h"

namespace tessera {

c10::DeviceType parse_device(const char* function, const std::string& device) {
  if (device == "cpu") return c10::DeviceType::CPU;
  if (device == "cuda") return c10::DeviceType::CUDA;
  throw std::invalid_argument(
      fmt::format("{}: device '{}' is not supported; use \"cpu\" or \"cuda\"", function, device));
}

int cuda_device_of(int64_t rank, int64_t local_rank, std::optional<int> given) {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  const int64_t count = hooks.hasCUDA() ? hooks.deviceCount() : 0;
  if (count == 0) {
    throw std::runtime_error(
        fmt::format("a mesh on cuda was asked for, and rank {} has no CUDA device ({}); use \"cpu\"", rank,
                    built_with_nccl() ? "no GPU was found" : "this build is without CUDA: build with --config=cuda"));
  }
  if (given && (*given < 0 || *given >= count)) {
    throw std::runtime_error(
        fmt::format("rank {} was given CUDA device {}, and there are {}, counted from 0", rank, *given, count));
  }
  if (given) return *given;
  if (count > 1 && local_rank >= count) {
    throw std::runtime_error(fmt::format(
        "rank {} is process {} of its host, counted from 0, and sees {} CUDA devices; start at most {} processes per "
        "host, let each process see its own device alone (CUDA_VISIBLE_DEVICES), or give WorldOptions::device_index",
        rank, local_rank, count, count));
  }
  return count == 1 ? 0 : static_cast<int>(local_rank);
}

}  // namespace tessera
