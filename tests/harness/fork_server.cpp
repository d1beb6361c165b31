#include "tessera/tests/harness/fork_server.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>

#include "tessera/tools/launcher/child_process.h"

namespace tessera::testing {
namespace {

// In a fork server this variable holds the number of the socket for requests.
constexpr const char* kSocketVariable = "TESSERA_TEST_FORK_SERVER";

// The owner sends this over the socket, then `bytes` bytes of strings, each with its terminating zero: `arguments`
// arguments, then the environment.
struct Request {
  pid_t owner = 0;
  pid_t group = 0;
  int out = -1;  // file descriptors of the owner
  int err = -1;
  uint64_t arguments = 0;
  uint64_t bytes = 0;
};

bool write_all(int fd, const void* data, std::size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::send(fd, next, size, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    next += count;
    size -= static_cast<std::size_t>(count);
  }
  return true;
}

bool read_all(int fd, void* data, std::size_t size) {
  char* next = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t count = ::recv(fd, next, size, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    next += count;
    size -= static_cast<std::size_t>(count);
  }
  return true;
}

std::vector<std::string> split(const std::string& strings) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < strings.size(); begin += parts.back().size() + 1) {
    parts.emplace_back(strings.c_str() + begin);
  }
  return parts;
}

void use_stream_of(pid_t owner, int fd, int as) {
  const int opened = ::open(fmt::format("/proc/{}/fd/{}", owner, fd).c_str(), O_WRONLY);
  if (opened < 0) ::_exit(127);
  ::dup2(opened, as);
  ::close(opened);
}

void use_environment(const std::vector<std::string>& lines) {
  ::clearenv();
  for (const std::string& line : lines) {
    const std::size_t equals = line.find('=');
    ::setenv(line.substr(0, equals).c_str(), line.substr(equals + 1).c_str(), 1);
  }
}

// Turns this process, whose parent is ending, into the requested rank. Returns its command line.
std::vector<std::string> become_rank(int socket, const Request& request, std::vector<std::string> strings) {
  while (::getppid() != request.owner) {
    if (::kill(request.owner, 0) != 0) ::_exit(127);
    ::usleep(100);
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != request.owner) ::_exit(127);
  ::setpgid(0, request.group);
  use_stream_of(request.owner, request.out, STDOUT_FILENO);
  use_stream_of(request.owner, request.err, STDERR_FILENO);
  const pid_t pid = ::getpid();
  const bool told = write_all(socket, &pid, sizeof pid);
  ::close(socket);
  if (!told) ::_exit(127);
  const auto environment = strings.begin() + static_cast<std::ptrdiff_t>(request.arguments);
  use_environment({environment, strings.end()});
  strings.erase(environment, strings.end());
  return strings;
}

// Forks twice. A rank whose parent has ended becomes the child of the owner, its nearest ancestor that is a subreaper.
// Returns true in the rank.
bool fork_rank() {
  const pid_t between = ::fork();
  if (between == 0) {
    const pid_t rank = ::fork();
    if (rank == 0) return true;
    ::_exit(rank < 0 ? 1 : 0);
  }
  if (between < 0 || wait_for(between) != 0) ::_exit(1);
  return false;
}

std::vector<std::string> serve(int socket) {
  while (true) {
    Request request;
    if (!read_all(socket, &request, sizeof request)) ::_exit(0);
    std::string strings(request.bytes, '\0');
    if (!read_all(socket, strings.data(), strings.size())) ::_exit(0);
    if (fork_rank()) return become_rank(socket, request, split(strings));
  }
}

// Returns this process's environment with the variables that a fork server needs.
std::vector<std::string> fork_server_environment(int socket) {
  std::vector<std::string> lines = {fmt::format("{}={}", kSocketVariable, socket), "OMP_NUM_THREADS=1"};
  for (char** line = environ; *line != nullptr; ++line) {
    if (!std::string_view(*line).starts_with("OMP_NUM_THREADS=")) lines.emplace_back(*line);
  }
  return lines;
}

// Becomes the fork server, in a child of `owner`. Calls only functions that are safe in a signal handler, since the
// owner may have other threads.
[[noreturn]] void become_fork_server(pid_t owner, const Program& program) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != owner) ::_exit(127);
  ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
  program.exec();
}

}  // namespace

ForkServer::ForkServer() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) {
    throw std::runtime_error(fmt::format("socketpair: {}", std::strerror(errno)));
  }
  ::fcntl(ends[0], F_SETFD, FD_CLOEXEC);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const Program program({"/proc/self/exe"}, fork_server_environment(ends[1]));
  const pid_t owner = ::getpid();
  pid_ = start_child([&]() -> int { become_fork_server(owner, program); });
  ::close(ends[1]);
  socket_ = ends[0];
}

ForkServer::~ForkServer() {
  ::close(socket_);
  wait_for(pid_);
}

Child ForkServer::start(const std::vector<std::string>& command, const std::vector<std::string>& environment,
                        pid_t group) {
  OutputPipe out;
  OutputPipe err;
  std::string strings;
  for (const auto* list : {&command, &environment}) {
    for (const std::string& line : *list) strings.append(line).push_back('\0');
  }
  const Request request = {.owner = ::getpid(),
                           .group = group,
                           .out = out.write_end(),
                           .err = err.write_end(),
                           .arguments = command.size(),
                           .bytes = strings.size()};
  pid_t pid = 0;
  const bool started = write_all(socket_, &request, sizeof request) &&
                       write_all(socket_, strings.data(), strings.size()) && read_all(socket_, &pid, sizeof pid);
  if (!started) throw std::runtime_error("the fork server, from which the ranks of a test case are forked, has died");
  return {.pid = pid, .out = out.take_read_end(), .err = err.take_read_end()};
}

std::optional<std::vector<std::string>> serve_if_fork_server() {
  const char* socket = std::getenv(kSocketVariable);
  if (socket == nullptr) return std::nullopt;
  return serve(std::stoi(socket));
}

}  // namespace tessera::testing
