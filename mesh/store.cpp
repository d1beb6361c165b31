#include "tessera/mesh/store.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/stable_hash.h"
#include "tessera/mesh/core/within.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/folder_store.h"
#include "tessera/mesh/job_folder.h"

namespace tessera {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

c10::intrusive_ptr<c10d::Store> make_folder_store(const Environment& environment, const std::string& path) {
  return c10::make_intrusive<FolderStore>(path, std::chrono::seconds(environment.timeout_seconds), is_failure_key);
}

c10::intrusive_ptr<c10d::Store> make_named_store(const Environment& environment) {
  const std::filesystem::path path = std::filesystem::absolute(environment.store_path);
  if (!std::filesystem::is_directory(path.parent_path())) {
    throw std::invalid_argument(
        fmt::format("TESSERA_STORE={}: {} is not a folder; give a path in one that all ranks can write",
                    environment.store_path, path.parent_path().string()));
  }
  return make_folder_store(environment, path);
}

// Returns a listening socket on the loopback address, which the server then uses.
int loopback_socket(int64_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool bound = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
                     bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                     listen(fd, SOMAXCONN) == 0;
  if (bound) return fd;
  const std::string reason = std::strerror(errno);
  if (fd >= 0) close(fd);
  throw std::runtime_error(fmt::format("the store's server cannot listen on {}:{}: {}; choose another MASTER_PORT",
                                       kLoopback, port, reason));
}

c10::intrusive_ptr<c10d::Store> make_tcp_store(const Environment& environment) {
  if (environment.master_port == 0) {
    throw std::invalid_argument(fmt::format(
        "MASTER_ADDR={} without MASTER_PORT; set both, to an address of rank 0's host", environment.master_address));
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(environment.master_port);
  options.isServer = environment.rank == 0 && !environment.agent_store;
  options.waitWorkers = false;
  options.timeout = std::chrono::seconds(environment.timeout_seconds);
  const bool here = (environment.one_host() || is_loopback(environment.master_address)) && !environment.agent_store;
  if (here && options.isServer) options.masterListenFd = loopback_socket(environment.master_port);
  const std::string host = here ? kLoopback : environment.master_address;
  try {
    // A server that accepts the connection and then answers nothing, as a stopped one, has no limit in c10d.
    return within(options.timeout, "connecting",
                  [=] { return c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::TCPStore>(host, options)); });
  } catch (const std::exception& error) {
    throw std::runtime_error(fmt::format("rank {}: the store at {}:{} cannot be {}: {}", environment.rank, host,
                                         environment.master_port, options.isServer ? "served" : "reached",
                                         error_text(error)));
  }
}

c10::intrusive_ptr<c10d::Store> make_base_store(const Environment& environment) {
  if (!environment.store_path.empty()) return make_named_store(environment);
  if (!environment.master_address.empty()) return make_tcp_store(environment);
  if (environment.one_host() && !environment.job_id.empty()) {
    return make_folder_store(environment, folder_of_job(environment.job_id));
  }
  throw std::invalid_argument(fmt::format(
      "rank {} of {} (from {}): nothing says where the ranks meet; set MASTER_ADDR and MASTER_PORT to an "
      "address of rank 0's host, or TESSERA_STORE to a path in a folder that all ranks can write, or start them with "
      "tools/launch",
      environment.rank, environment.size, environment.launcher));
}

}  // namespace

c10::intrusive_ptr<c10d::Store> make_store(const Environment& environment) {
  auto base = make_base_store(environment);
  base->setTimeout(std::chrono::seconds(environment.timeout_seconds));
  const std::string job = environment.job_key.empty() ? "" : fmt::format("{:016x}/", stable_hash(environment.job_key));
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}restart{}", job, environment.restart_count),
                                                std::move(base));
}

}  // namespace tessera
