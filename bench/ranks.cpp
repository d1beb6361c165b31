#include "tessera/bench/ranks.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/tools/launcher/child_process.h"

namespace tessera::bench {
namespace {

// Returns the address of `name` in Linux's abstract namespace: a zero, then the name, then zeros.
sockaddr_un address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  return address;
}

bool write_line(int file, const std::string& text) {
  const std::string line = text + "\n";
  return ::send(file, line.data(), line.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(line.size());
}

bool read_line(int file, std::string& pending, std::string& line) {
  while (pending.find('\n') == std::string::npos) {
    char buffer[512];
    const ssize_t got = ::read(file, buffer, sizeof buffer);
    if (got <= 0) return false;
    pending.append(buffer, static_cast<std::size_t>(got));
  }
  line = pending.substr(0, pending.find('\n'));
  pending.erase(0, line.size() + 1);
  return true;
}

}  // namespace

Ranks::Ranks(const std::string& name, std::vector<std::string> command, int64_t size) : name_(name) {
  const std::string socket = fmt::format("tessera-bench-{}-{}", ::getpid(), name);
  const sockaddr_un address = address_of(socket);
  listening_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listening_ < 0 || ::bind(listening_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listening_, static_cast<int>(size)) != 0) {
    throw std::runtime_error(fmt::format("ranks: no socket {}: {}", socket, std::strerror(errno)));
  }
  command.push_back(socket);
  const Program program(std::move(command));
  pid_ = start_child([&]() -> int { program.exec(); });
  accept_all(size);
}

Ranks::~Ranks() {
  for (const Line& rank : ranks_) {
    if (rank.file >= 0) ::close(rank.file);
  }
  ::close(listening_);
  if (pid_ > 0) wait_for(pid_);
}

// Accepts the ranks' connections. The first line that a rank sends is its number.
void Ranks::accept_all(int64_t size) {
  ranks_.resize(static_cast<std::size_t>(size));
  for (int64_t come = 0; come < size;) {
    pollfd waiting{.fd = listening_, .events = POLLIN, .revents = 0};
    if (::poll(&waiting, 1, 200) == 0) {
      if (::waitpid(pid_, nullptr, WNOHANG) != pid_) continue;
      pid_ = -1;
      throw std::runtime_error(fmt::format("{}: it ended before its ranks connected; its own error is above", name_));
    }
    Line rank{.file = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC), .pending = {}};
    std::string number;
    if (rank.file < 0 || !read_line(rank.file, rank.pending, number)) continue;
    ranks_.at(std::stoul(number)) = rank;
    ++come;
  }
}

std::vector<std::string> Ranks::ask(const std::string& line) {
  for (const Line& rank : ranks_)
    write_line(rank.file, line);  // a rank that has ended is noticed when it does not answer
  std::vector<std::string> answers;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    std::string answer;
    if (!read_line(ranks_[i].file, ranks_[i].pending, answer)) {
      throw std::runtime_error(fmt::format("{}: rank {} has ended at \"{}\"; its own error is above", name_, i, line));
    }
    answers.push_back(answer);
  }
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].starts_with("error ")) {
      throw std::runtime_error(fmt::format("{}: rank {} at \"{}\": {}", name_, i, line, answers[i].substr(6)));
    }
  }
  return answers;
}

RankLine::RankLine(const std::string& socket, int64_t rank) {
  const sockaddr_un address = address_of(socket);
  file_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (file_ < 0 || ::connect(file_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    throw std::runtime_error(fmt::format("ranks: cannot connect to socket {}: {}", socket, std::strerror(errno)));
  }
  answer(std::to_string(rank));
}

RankLine::~RankLine() { ::close(file_); }

bool RankLine::next(std::string& line) { return read_line(file_, pending_, line); }

void RankLine::answer(const std::string& text) { write_line(file_, text); }

}  // namespace tessera::bench
