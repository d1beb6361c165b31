#include "tessera/mesh/process_state.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <optional>
#include <random>
#include <sstream>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tessera {
namespace {

constexpr const char* kCannotTell = "-";

// Holds the beginning of a file, which is all of it for those that are read here.
struct Beginning {
  std::string text;
  int error = 0;  // the system's reason why it cannot be read

  std::string line() const { return text.substr(0, text.find('\n')); }
};

// Reads from `fd` and closes it. A negative `fd` stands for an open() that has just failed.
Beginning read_and_close(int fd) {
  if (fd < 0) return {.text = {}, .error = errno};
  std::array<char, 4096> part{};
  ssize_t count = 0;
  do {
    count = ::read(fd, part.data(), part.size());
  } while (count < 0 && errno == EINTR);
  const int error = count < 0 ? errno : 0;
  ::close(fd);
  return {.text = std::string(part.data(), count > 0 ? static_cast<std::size_t>(count) : 0), .error = error};
}

Beginning read_beginning(const std::string& path) { return read_and_close(::open(path.c_str(), O_RDONLY | O_CLOEXEC)); }

// Returns what a symbolic link holds, or "".
std::string link_at(const std::string& path) {
  std::array<char, 128> link{};
  const ssize_t length = ::readlink(path.c_str(), link.data(), link.size());
  return {link.data(), length > 0 ? static_cast<std::size_t>(length) : 0};
}

// Returns the state letter and the start time in the text of /proc/PID/stat, or nullopt if it lacks them.
std::optional<std::pair<char, std::string>> state_in(const std::string& stat) {
  // The command's name stands in parentheses and may itself contain some, so the fields start after the last ')'.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(stat.substr(name_end + 1));
  char state = '?';
  fields >> state;
  std::string field;
  for (int i = 4; i <= 22; ++i) fields >> field;
  if (!fields) return std::nullopt;
  return std::make_pair(state, field);
}

// Returns text that is equal for two processes if they can see each other under `proc`. In another PID namespace than
// that of `proc`, its numbers are those of other processes.
std::string process_space(const std::string& proc) {
  if (link_at(proc + "/self") != std::to_string(::getpid())) return kCannotTell;
  const std::string boot = read_beginning(proc + "/sys/kernel/random/boot_id").line();
  const std::string name_space = link_at(proc + "/self/ns/pid");
  return boot.empty() || name_space.empty() ? kCannotTell : boot + ":" + name_space;
}

std::chrono::milliseconds now() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch());
}

// Holds the words of a description, in their order; it is whole if it has all of them.
struct Words {
  pid_t pid = 0;
  std::string start, space, host, number;
  int64_t time = 0;
  bool whole = false;
};

Words words_of(const std::string& description) {
  std::istringstream in(description);
  Words words;
  in >> words.pid >> words.start >> words.space >> words.host >> words.number >> words.time;
  words.whole = !in.fail();
  return words;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

}  // namespace

std::string describe_this_process(const std::string& proc) {
  const auto state = state_in(read_beginning(fmt::format("{}/{}/stat", proc, ::getpid())).text);
  return fmt::format("{} {} {} {} {:x} {}", ::getpid(), state ? state->second : "?",
                     state ? process_space(proc) : kCannotTell, host_name(), std::random_device()(), now().count());
}

std::chrono::milliseconds age_of(const std::string& description) {
  const Words words = words_of(description);
  return words.whole ? now() - std::chrono::milliseconds(words.time) : std::chrono::milliseconds::zero();
}

std::string named_process(const std::string& description) {
  const Words words = words_of(description);
  return fmt::format("process {} on host {}", words.pid, words.host);
}

bool process_has_ended(const std::string& description, const std::string& proc) {
  const Words words = words_of(description);
  if (!words.whole || words.pid <= 0 || words.space == kCannotTell || words.space != process_space(proc)) return false;
  const Beginning stat = read_beginning(fmt::format("{}/{}/stat", proc, words.pid));
  // A /proc that is mounted with hidepid may hide a process that runs.
  if (stat.error == ENOENT || stat.error == ESRCH) return ::kill(words.pid, 0) != 0 && errno == ESRCH;
  const auto state = state_in(stat.text);
  return state && (state->first == 'Z' || state->first == 'X' || state->second != words.start);
}

std::string read_note(const std::string& path) {
  // Opening a FIFO would wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  struct stat status {};
  const bool is_ours = fd >= 0 && ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
  if (is_ours) return read_and_close(fd).line();
  if (fd >= 0) ::close(fd);
  return "";
}

}  // namespace tessera
