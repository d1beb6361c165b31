#include "tessera/mesh/backends/nccl_group.h"

#include <stdexcept>

#ifdef USE_C10D_NCCL
#include <cstdlib>
#include <exception>
#include <string>

#include <fmt/format.h>

#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace tessera {

#ifdef USE_C10D_NCCL

bool built_with_nccl() { return true; }

namespace {

// After an error or a timeout LibTorch's watchdog would end the process. With these settings it aborts the
// communicator, so that a host that waits for the GPU goes on, and the next collective throws. What the user has set
// stays.
void keep_the_process() {
  constexpr const char* kAbortOnly = "2";
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", kAbortOnly, /*overwrite=*/0);
  for (const char* const name : {"TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"}) {
    setenv(name, "0", /*overwrite=*/0);
  }
}

}  // namespace

BackendGroup make_nccl_group(const GroupRequest& request) {
  keep_the_process();
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size, options);
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(request.device_index));
  nccl->setBoundDeviceId(device);
  try {
    nccl->eagerConnectSingleDevice(device);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    if (text.find("Duplicate GPU") == std::string::npos) throw;
    throw std::runtime_error(
        fmt::format("NCCL refuses several ranks on one GPU ({}); give each rank a GPU of its own, or set "
                    "TESSERA_CUDA_BACKEND=gloo to develop on one",
                    device.str()));
  }
  const auto close = [nccl] {
    try {
      nccl->abort();
    } catch (const std::exception& error) {
      spdlog::debug("closing an NCCL group: {}", error.what());
    }
  };
  return {.backend = nccl, .close = close, .closes_while_busy = true};
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
