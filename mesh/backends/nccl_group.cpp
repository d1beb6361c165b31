#include "tessera/mesh/backends/nccl_group.h"

#include <stdexcept>

#ifdef USE_C10D_NCCL
#include <exception>

#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace tessera {

#ifdef USE_C10D_NCCL

bool built_with_nccl() { return true; }

BackendGroup make_nccl_group(const GroupRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size, options);
  nccl->setBoundDeviceId(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(request.device_index)));
  const auto close = [nccl] {
    try {
      nccl->abort();
    } catch (const std::exception& error) {
      spdlog::debug("closing an NCCL group: {}", error.what());
    }
  };
  return {.backend = nccl, .close = close};
}

#else

bool built_with_nccl() { return false; }

BackendGroup make_nccl_group(const GroupRequest&) {
  throw std::runtime_error(
      "groups for CUDA tensors need NCCL, which this build does not have; build with --config=cuda, or use a mesh on "
      "\"cpu\"");
}

#endif

}  // namespace tessera
