#include "tessera/tools/launcher/watchdog.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/spawn.h"

namespace tessera {
namespace {

// The watchdog calls only functions that are safe in a signal handler, since the process of which it is a copy may have
// had other threads. So it uses neither streams, std::filesystem nor memory from the heap.

constexpr int kMostPasses = 2000;
constexpr timespec kPause = {.tv_sec = 0, .tv_nsec = 1'000'000};

const char* mark_of_group = nullptr;  // never empty

// Is the layout of what the system call getdents64 writes.
struct Entry {
  uint64_t inode;
  int64_t offset;
  unsigned short size;
  unsigned char type;
  char name[1];  // more bytes follow
};

// Returns the number that `text` is, or 0.
pid_t number_of(const char* text) {
  pid_t number = 0;
  for (; *text >= '0' && *text <= '9'; ++text) number = number * 10 + (*text - '0');
  return *text == '\0' ? number : 0;
}

// Says, byte by byte, whether one of the variables of an environment is the mark.
class MarkFinder {
 public:
  bool is_end_of_mark(char byte) {
    if (byte == '\0') {
      const bool found = is_same_ && mark_of_group[position_] == '\0';
      position_ = 0;
      is_same_ = true;
      return found;
    }
    is_same_ = is_same_ && mark_of_group[position_] == byte;
    if (is_same_) ++position_;
    return false;
  }

 private:
  std::size_t position_ = 0;
  bool is_same_ = true;
};

bool has_mark(int processes, const char* pid) {
  const int folder = ::openat(processes, pid, O_RDONLY | O_DIRECTORY);
  const int file = folder < 0 ? -1 : ::openat(folder, "environ", O_RDONLY);
  bool found = false;
  MarkFinder finder;
  std::array<char, 4096> buffer;
  for (ssize_t count; !found && file >= 0 && (count = ::read(file, buffer.data(), buffer.size())) > 0;) {
    for (ssize_t i = 0; i < count; ++i) found = finder.is_end_of_mark(buffer[static_cast<std::size_t>(i)]) || found;
  }
  if (file >= 0) ::close(file);
  if (folder >= 0) ::close(folder);
  return found;
}

// Kills the processes that have the mark. Returns whether there was one.
bool kill_marked(pid_t self) {
  const int processes = ::open("/proc", O_RDONLY | O_DIRECTORY);
  if (processes < 0) return false;
  bool any = false;
  alignas(Entry) std::array<char, 8192> buffer;
  for (long count; (count = ::syscall(SYS_getdents64, processes, buffer.data(), buffer.size())) > 0;) {
    for (long at = 0; at < count;) {
      const Entry* const entry = reinterpret_cast<const Entry*>(buffer.data() + at);
      const char* const name = buffer.data() + at + offsetof(Entry, name);
      const pid_t pid = number_of(name);
      if (pid > 0 && pid != self && has_mark(processes, name)) any = ::kill(pid, SIGKILL) == 0 || any;
      at += entry->size;
    }
  }
  ::close(processes);
  return any;
}

int parent_died_signal() { return SIGRTMIN + 5; }

// A process that starts a program has no environment for a moment, and one that is being killed may still make another,
// so it ends when two passes in a row find nobody.
extern "C" void kill_group(int) {
  const pid_t self = ::getpid();
  int empty_passes = mark_of_group == nullptr ? 2 : 0;
  for (int pass = 0; pass < kMostPasses && empty_passes < 2; ++pass) {
    empty_passes = kill_marked(self) ? 0 : empty_passes + 1;
    ::nanosleep(&kPause, nullptr);
  }
  ::kill(0, SIGKILL);
}

// The environment of a launcher that another one has started has the other's mark; a watchdog that it starts must
// outlive the search for that mark, to end its own group.
void hide_own_environment() {
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    for (char* byte = *variable; *byte != '\0'; ++byte) *byte = '\0';
  }
}

// Writes a byte to `ready`, waits until the parent dies, then kills the group. Blocks every other signal, so that
// signals to the group do not end it.
[[noreturn]] void kill_group_with_parent(pid_t parent, int ready) {
  ::setpgid(0, 0);
  hide_own_environment();
  sigset_t others;
  sigfillset(&others);
  sigdelset(&others, parent_died_signal());
  ::sigprocmask(SIG_SETMASK, &others, nullptr);
  ::signal(parent_died_signal(), kill_group);
  signal_when_parent_ends(parent, parent_died_signal());
  if (::write(ready, "", 1) < 0) ::_exit(127);
  // This process must not hold open the pipes of other groups or the caller's output after their owners have ended.
  ::close_range(0, ~0U, 0);
  while (true) ::pause();
}

// Is the pipe by which a watchdog says that it would see its parent's death.
class ReadyPipe {
 public:
  ReadyPipe() {
    if (::pipe2(ends_.data(), O_CLOEXEC) == 0) return;
    throw std::runtime_error(
        fmt::format("a pipe to a launcher's watchdog cannot be made: {}; raise the limit of open files (ulimit -n)",
                    std::strerror(errno)));
  }
  ~ReadyPipe() {
    ::close(ends_[0]);
    if (ends_[1] >= 0) ::close(ends_[1]);
  }
  ReadyPipe(const ReadyPipe&) = delete;
  ReadyPipe& operator=(const ReadyPipe&) = delete;

  int write_end() const { return ends_[1]; }

  // Waits until the watchdog has written its byte, or has ended without. Returns whether it has written it.
  bool wait() {
    ::close(std::exchange(ends_[1], -1));
    char byte = 0;
    ssize_t count = 0;
    while ((count = ::read(ends_[0], &byte, 1)) < 0 && errno == EINTR) continue;
    return count == 1;
  }

 private:
  std::array<int, 2> ends_{};  // for reading and for writing
};

// Blocks this thread's signals while it lives, and those of a child that is made meanwhile.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_{};
};

// A signal to the caller's group, in which the watchdog is at first, would end or stop it.
pid_t start_watchdog(const std::string& mark, int ready) {
  const BlockedSignals blocked;
  const pid_t parent = ::getpid();
  const pid_t pid = start_child([&]() -> int {
    mark_of_group = mark.empty() ? nullptr : mark.c_str();
    kill_group_with_parent(parent, ready);
  });
  ::setpgid(pid, pid);
  ::kill(pid, SIGCONT);  // SIGSTOP cannot be blocked
  return pid;
}

}  // namespace

pid_t spawn_watchdog(const std::string& mark) {
  ReadyPipe ready;
  const pid_t pid = start_watchdog(mark, ready.write_end());
  if (!ready.wait()) {
    wait_for(pid);
    throw std::runtime_error("a launcher's watchdog has ended before the ranks were started; start the job again");
  }
  return pid;
}

}  // namespace tessera
