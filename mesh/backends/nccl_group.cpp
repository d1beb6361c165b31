#include "tessera/mesh/backends/nccl_group.h"

#include <chrono>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/within.h"

#ifdef USE_C10D_NCCL
#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/mesh/backends/orderly_end.h"
#endif

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kToAbort{4000};

// Aborts what the GPU has not done yet. A CUDA graph that has a collective of this group makes NCCL wait for the
// graph's end, so an abort that takes long is left to itself.
void abort_in_time(c10::intrusive_ptr<c10d::Backend> backend) noexcept {
  try {
    within(kToAbort, "closing an NCCL group", [backend = std::move(backend)]() mutable {
      backend->abort();
      backend.reset();  // before the caller is told: the process may end then
    });
  } catch (const std::exception& error) {
    logger().debug("closing an NCCL group: {}", error.what());
  }
}

// LibTorch's watchdog notes the error before it aborts the group.
std::optional<WaitError::Cause> cause_of_abort(c10d::Backend& backend) {
  const c10d::ErrorType error = backend.getError();
  if (error == c10d::ErrorType::SUCCESS) return std::nullopt;
  return error == c10d::ErrorType::TIMEOUT ? WaitError::Cause::kTimeout : WaitError::Cause::kLost;
}

// A backend of another class may have NCCL's name, and then need not tell of its errors.
bool tells_errors(c10d::Backend& backend) {
  try {
    backend.getError();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

BackendGroup wrap_nccl_group(c10::intrusive_ptr<c10d::Backend> backend) {  // NOLINT: its copies live on
  BackendGroup group{.backend = backend, .close = [backend] { abort_in_time(backend); }, .closes_while_busy = true};
  if (tells_errors(*backend)) group.aborted = [backend] { return cause_of_abort(*backend); };
  return group;
}

#ifdef USE_C10D_NCCL

bool built_with_nccl() { return true; }

// The function is that of the library that LibTorch has loaded, so that programs need not find one more.
bool cuda_stream_is_captured(c10::Device device) {
  using Ask = cudaError_t(cudaStream_t, cudaStreamCaptureStatus*);
  static auto* const ask = [] {
    constexpr const char* kName = "cudaStreamIsCapturing";
    void* found = dlsym(RTLD_DEFAULT, kName);
    if (found == nullptr) {
      const std::string file = fmt::format("libcudart.so.{}", CUDART_VERSION / 1000);
      void* const library = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
      if (library != nullptr) found = dlsym(library, kName);
    }
    if (found == nullptr) logger().warn("CUDA's {} was not found; do not capture parameters cut by ZeRO", kName);
    return reinterpret_cast<Ask*>(found);
  }();
  if (ask == nullptr) return false;
  const c10::DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return ask(c10::cuda::getCurrentCUDAStream(device.index()), &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

namespace {

// After an error, a timeout or a failed check on the device LibTorch's watchdog would end the process. With these
// settings it aborts the communicator, at once, so that a host that waits for the GPU goes on, and the next collective
// throws. The last one keeps the GPU's work of several communicators in the order in which the host has queued it, on
// each rank: else two GPUs could each begin with another one's, and wait for each other. What the user has set stays,
// except for a handling of "1", which ends the process too: torchrun sets it for every job.
void set_up_nccl() {
  constexpr const char* kHandling = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
  constexpr const char* kAbortOnly = "2";
  constexpr std::string_view kEndTheProcess = "1";
  const char* const given = std::getenv(kHandling);
  setenv(kHandling, kAbortOnly, /*overwrite=*/given != nullptr && given == kEndTheProcess);
  for (const char* const name : {"TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT",
                                 "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_RETHROW_CUDA_ERRORS"}) {
    setenv(name, "0", /*overwrite=*/0);
  }
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
}

// The destructor of LibTorch's class aborts what the GPU has not done yet, and thereby what other ranks wait for. It
// throws, and so ends the process, where an abort fails that nobody has tried before.
class NcclGroup final : public c10d::ProcessGroupNCCL, public OrderlyEnd {
 public:
  NcclGroup(const GroupRequest& request, c10::Device device, c10::intrusive_ptr<Options> options)
      : ProcessGroupNCCL(request.store, request.rank, request.size, std::move(options)),
        device_(device),
        limit_(request.timeout) {}

  // LibTorch makes a group of NCCL of the broadcasts, and leaves it open where one of them throws: nothing that this
  // thread starts later would run.
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    const uint64_t open = ncclActiveGroupCounter_;
    try {
      return ProcessGroupNCCL::allgather(outputs, inputs, options);
    } catch (...) {
      if (ncclActiveGroupCounter_ > open) end_broadcasts();
      throw;
    }
  }

  // LibTorch's watchdog sets no time limit for the work that a CUDA graph has started.
  void drain() override {
    within(limit_, "waiting for the GPU", [device = device_] {
      // This is a thread of its own. LibTorch would set its device back to cuda:0, which makes a context there.
      const c10::DeviceGuard guard(device);
      c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    });
  }
  // A shutdown that is late holds what an abort needs.
  void end() override {
    try {
      within(limit_, "ending an NCCL group", [self = shared()]() mutable {
        self->shutdown();
        self.reset();  // before the caller is told: the process may end then
      });
    } catch (const LateError&) {
      throw;
    } catch (...) {
      abort_in_time(shared());
      throw;
    }
  }

 private:
  void end_broadcasts() noexcept {
    try {
      groupEnd();
    } catch (const std::exception& error) {
      logger().debug("ending a group of NCCL's broadcasts: {}", error.what());
    }
  }
  c10::intrusive_ptr<NcclGroup> shared() { return c10::intrusive_ptr<NcclGroup>::unsafe_reclaim_from_nonowning(this); }

  const c10::Device device_;
  const std::chrono::milliseconds limit_;
};

}  // namespace

BackendGroup make_nccl_group(const GroupRequest& request) {
  set_up_nccl();
  // Other streams of the process, such as those of files, come from another pool, and never are this group's.
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = request.timeout;
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(request.device_index));
  const c10::DeviceGuard guard(device);  // this may be a thread of its own, where no device is set
  const auto nccl = c10::make_intrusive<NcclGroup>(request, device, options);
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
  return wrap_nccl_group(nccl);
}

#else

bool built_with_nccl() { return false; }

bool cuda_stream_is_captured(c10::Device) { return false; }

BackendGroup make_nccl_group(const GroupRequest&) {
  throw std::runtime_error(
      "groups for CUDA tensors need NCCL, which this build does not have; build Tessera with --config=cuda, which is "
      "--define=tessera_cuda=true in a project of your own, or use a mesh on \"cpu\"");
}

#endif

}  // namespace tessera
