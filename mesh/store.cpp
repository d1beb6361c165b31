#include "tessera/mesh/store.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/stable_hash.h"
#include "tessera/mesh/core/within.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/folder_store.h"
#include "tessera/mesh/job_folder.h"
#include "tessera/mesh/signed_store.h"

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
    throw std::runtime_error(
        fmt::format("rank {}: the store at {}:{} cannot be {}: {}; {}", environment.rank, host, environment.master_port,
                    options.isServer ? "served" : "reached", error_text(error),
                    options.isServer ? "choose another MASTER_PORT"
                                     : "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT are its host's, and "
                                       "that no firewall closes the port"));
  }
}

// Throws unless it is a regular file of this user that nobody else can read: another would be no secret.
void check_secret_file(const std::string& path, const struct stat& status) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(fmt::format("TESSERA_SECRET_FILE={}: {}", path, why));
  };
  if (!S_ISREG(status.st_mode)) refuse("it is no regular file; name a file of this user");
  if (status.st_uid != geteuid()) refuse(fmt::format("it is user {}'s; name a file of this user", status.st_uid));
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    refuse(fmt::format("others can read it (mode {:o}); chmod 600 it", status.st_mode & 0777));
}

// Returns what the file holds, without white space at its end.
std::string read_secret(const std::string& path) {
  struct stat status {};
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO would wait for a writer
  const std::unique_ptr<FILE, int (*)(FILE*)> file(fd < 0 ? nullptr : fdopen(fd, "r"), fclose);
  if (!file || fstat(fd, &status) != 0) {
    throw std::invalid_argument(fmt::format("TESSERA_SECRET_FILE={}: it cannot be read: {}; name a file of this user",
                                            path, std::strerror(errno)));
  }
  check_secret_file(path, status);
  std::string secret(static_cast<std::size_t>(status.st_size), '\0');
  secret.resize(std::fread(secret.data(), 1, secret.size(), file.get()));
  secret.erase(secret.find_last_not_of(" \n\r\t") + 1);
  if (secret.empty()) throw std::invalid_argument(fmt::format("TESSERA_SECRET_FILE={}: it is empty", path));
  return secret;
}

c10::intrusive_ptr<c10d::Store> make_network_store(const Environment& environment) {
  const std::string secret =
      environment.secret_file.empty() ? environment.secret : read_secret(environment.secret_file);
  auto store = make_tcp_store(environment);
  return secret.empty() ? store : signed_store(std::move(store), secret);
}

// On one host no port is needed: MASTER_PORT only names the job.
bool meet_in_folder(const Environment& environment) {
  return environment.one_host() && !environment.agent_store &&
         (!environment.job_id.empty() || environment.master_port != 0);
}

c10::intrusive_ptr<c10d::Store> make_base_store(const Environment& environment) {
  if (!environment.store_path.empty()) return make_named_store(environment);
  if (meet_in_folder(environment)) {
    const std::string port = environment.master_port == 0 ? "" : fmt::format(" port {}", environment.master_port);
    return make_folder_store(environment, folder_of_job(environment.job_id + port));
  }
  if (!environment.master_address.empty()) return make_network_store(environment);
  throw std::invalid_argument(fmt::format(
      "rank {} of {} (from {}): nothing says where the ranks meet; set MASTER_ADDR and MASTER_PORT to an "
      "address of rank 0's host, or, for ranks of one host, TESSERA_STORE to a path in a local folder that all of them "
      "can write, or start them with tools/launch",
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
