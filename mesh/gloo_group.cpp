// The only file that includes Gloo's names: libtorch_cpu has its code but not its headers.
#include "tessera/mesh/backend_group.h"

#include <exception>
#include <utility>

#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace tessera {
namespace {

// Gives access to the connections: c10d has no way to abort a Gloo group, and destroying one waits for what is in flight.
class ClosableGloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void close() noexcept {
    for (const auto& context : contexts_) {
      try {
        context->closeConnections();
      } catch (const std::exception& error) {
        spdlog::debug("closing a Gloo group: {}", error.what());
      }
    }
  }
};

c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> options_for(const GroupRequest& request) {
  if (!request.one_host) return c10d::ProcessGroupGloo::Options::create_default(request.timeout);
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return options;
}

}  // namespace

BackendGroup make_gloo_group(const GroupRequest& request) {
  auto gloo = c10::make_intrusive<ClosableGloo>(request.store, request.rank, request.size, options_for(request));
  return {.backend = gloo, .close = [gloo] { gloo->close(); }};
}

}  // namespace tessera
