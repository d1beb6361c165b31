// This is the only file that uses Gloo's names: libtorch_cpu contains its code, but LibTorch does not ship its headers.
#include "tessera/mesh/backends/backend_group.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/mesh/backends/own_address.h"
#include "tessera/mesh/core/logger.h"

namespace tessera {
namespace {

// Is the tag of a message that nobody sends.
constexpr int kNeverSent = std::numeric_limits<int>::max();

// c10d cannot abort a Gloo group, and destroying one waits for collectives in progress. Where a receive times out, Gloo
// ends by an error whatever this rank has in progress with any peer, and closes the connections, by which the peers'
// ends fail too. A receive from a peer that is lost already fails at once, and changes nothing for the others.
void abort_gloo(c10d::ProcessGroupGloo& group) noexcept {
  for (int peer = 0; peer < group.getSize(); ++peer) {
    if (peer == group.getRank()) continue;
    try {
      std::vector<at::Tensor> nothing = {at::empty({1}, at::kByte)};
      group.recv(nothing, peer, kNeverSent)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception& error) {
      logger().debug("closing a Gloo group: {}", error.what());
    }
  }
}

void abort(c10d::Backend& group) noexcept {
  try {
    group.abort();
  } catch (const std::exception& error) {
    logger().debug("closing a process group: {}", error.what());
  }
}

// Gloo writes to connections whose other end may be closed. SIGPIPE would then kill the process before it can report
// the error. A handler that the program has set stays.
void survive_lost_peers() {
  struct sigaction now {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> options_for(const GroupRequest& request) {
  // This variable is read here, as Gloo reads its own: a World that a program makes itself has no environment.
  const char* const meeting_point = std::getenv("MASTER_ADDR");
  const std::string address = request.one_host ? "127.0.0.1" : own_address(meeting_point ? meeting_point : "");
  if (address.empty()) return c10d::ProcessGroupGloo::Options::create_default(request.timeout);
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return options;
}

}  // namespace

BackendGroup make_gloo_group(const GroupRequest& request) {
  survive_lost_peers();
  BackendGroup group = wrap_group(
      c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.size, options_for(request)));
  // A member returns when its own ends are connected, maybe before another member has accepted the connection. If it
  // ended now, the other would take it as lost; so all members wait for each other here.
  group.backend->barrier()->wait();
  return group;
}

BackendGroup wrap_group(c10::intrusive_ptr<c10d::Backend> backend) {
  auto* const gloo = dynamic_cast<c10d::ProcessGroupGloo*>(backend.get());
  if (gloo == nullptr) return {.backend = backend, .close = [backend] { abort(*backend); }};
  survive_lost_peers();
  return {.backend = backend, .close = [backend, gloo] { abort_gloo(*gloo); }, .closes_while_busy = true};
}

}  // namespace tessera
