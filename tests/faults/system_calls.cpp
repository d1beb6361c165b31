// Takes the place of some system calls' functions in the whole program, since a program's own symbols come before those
// of libraries. Each counts, and fails or kills the process where the plan says so. They allocate nothing.
#include "tessera/tests/faults/system_calls.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <linux/limits.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tessera::faults {
namespace {

struct Planned {
  int call = -1;   // index in kCalls, or -1 for any
  int place = -1;  // index in kPlaces, or -1 for any
  int64_t count = 0;
  int error = 0;  // 0: the process is killed
  bool lasting = false;
  const char* store = "";
  const char* states = "";
};

Planned planned;
std::atomic<bool> counting{false};
std::atomic<bool> has_fault{false};
std::atomic<int64_t> matching{0};
std::atomic<bool> said{false};
std::atomic<int64_t> made[kPlaces.size()][kCalls.size()];

constexpr int kOther = 2;

template <std::size_t kSize>
int index_in(const std::array<std::string_view, kSize>& names, std::string_view name) {
  for (std::size_t i = 0; i < kSize; ++i) {
    if (names[i] == name) return static_cast<int>(i);
  }
  return -1;
}

bool begins_with(const char* path, const char* start) {
  return *start != '\0' && std::strncmp(path, start, std::strlen(start)) == 0;
}

int place_of_path(const char* path) {
  if (begins_with(path, planned.states)) return 1;
  return begins_with(path, planned.store) ? 0 : kOther;
}

int place_of_file(int fd) {
  char link[64];
  char path[PATH_MAX] = {};
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const long length = ::syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof(path) - 1);
  return length > 0 ? place_of_path(path) : kOther;
}

int place_of_path_at(int folder, const char* path) {
  return path[0] == '/' || folder == AT_FDCWD ? place_of_path(path) : place_of_file(folder);
}

// Says whether a full disk would still take these bytes, since their blocks are the file's already.
bool has_space(int fd, int64_t offset, std::size_t size) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return false;
  if (offset < 0) offset = ::syscall(SYS_lseek, fd, 0, SEEK_CUR);
  return offset + static_cast<int64_t>(size) <= status.st_blocks * 512;
}

enum class Now { kGoOn, kFail, kKill };

// Counts one call, and says what becomes of it.
Now next_call(int call, int place) {
  if (!counting.load(std::memory_order_relaxed)) return Now::kGoOn;
  ++made[place][call];
  if (!has_fault.load(std::memory_order_relaxed)) return Now::kGoOn;
  if ((planned.call >= 0 && planned.call != call) || (planned.place >= 0 && planned.place != place)) return Now::kGoOn;
  const int64_t number = ++matching;
  if (number < planned.count || (number > planned.count && !planned.lasting)) return Now::kGoOn;
  if (!said.exchange(true)) say_fault();
  return planned.error == 0 ? Now::kKill : Now::kFail;
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  while (true) ::pause();
}

// Returns whether the call is to fail, with errno set.
bool fails(int call, int place) {
  const Now now = next_call(call, place);
  if (now == Now::kKill) die();
  if (now == Now::kFail) errno = planned.error;
  return now == Now::kFail;
}

enum Call { kOpen, kCreate, kWrite, kPwrite, kLinkat, kRename, kFsync, kSocket, kUnlinkat };

// A killed write leaves half of its bytes.
bool write_fails(int call, int fd, const void* data, std::size_t size, int64_t offset) {
  if (!counting.load(std::memory_order_relaxed) || fd <= STDERR_FILENO) return false;
  const int place = place_of_file(fd);
  if (place == kOther) return false;
  if (has_fault && planned.error == ENOSPC && has_space(fd, offset, size)) return false;
  const Now now = next_call(call, place);
  if (now == Now::kKill) {
    offset < 0 ? ::syscall(SYS_write, fd, data, size / 2) : ::syscall(SYS_pwrite64, fd, data, size / 2, offset);
    die();
  }
  if (now == Now::kFail) errno = planned.error;
  return now == Now::kFail;
}

int open_at(int folder, const char* path, int flags, unsigned mode) {
  const bool counts = counting.load(std::memory_order_relaxed);
  if (counts && fails((flags & O_CREAT) != 0 ? kCreate : kOpen, place_of_path_at(folder, path))) return -1;
  return static_cast<int>(::syscall(SYS_openat, folder, path, flags, mode));
}

}  // namespace

void watch_calls(const FaultPlan& plan, bool is_victim, const char* store, const char* states) {
  planned = {.call = index_in(kCalls, plan.call),
             .place = index_in(kPlaces, plan.place),
             .count = plan.count,
             .error = plan.fault == "error" ? plan.error : 0,
             .lasting = plan.lasting,
             .store = store,
             .states = states};
  has_fault = is_victim && plan.point == "call";
  counting = true;
}

int64_t calls_made(std::size_t place, std::size_t call) { return made[place][call]; }

void say_fault() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  char line[64];
  const int size = std::snprintf(line, sizeof(line), "fault %lld\n", 1'000'000'000LL * now.tv_sec + now.tv_nsec);
  ::syscall(SYS_write, STDOUT_FILENO, line, size);
}

}  // namespace tessera::faults

using namespace tessera::faults;

// Reads the third argument, which only a call that may make a file has.
#define TESSERA_MODE_AFTER(flags)               \
  unsigned mode = 0;                            \
  if (((flags) & (O_CREAT | O_TMPFILE)) != 0) { \
    va_list arguments;                          \
    va_start(arguments, flags);                 \
    mode = va_arg(arguments, unsigned);         \
    va_end(arguments);                          \
  }

extern "C" {

int open(const char* path, int flags, ...) {
  TESSERA_MODE_AFTER(flags)
  return open_at(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  TESSERA_MODE_AFTER(flags)
  return open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}

int openat(int folder, const char* path, int flags, ...) {
  TESSERA_MODE_AFTER(flags)
  return open_at(folder, path, flags, mode);
}

int openat64(int folder, const char* path, int flags, ...) {
  TESSERA_MODE_AFTER(flags)
  return open_at(folder, path, flags | O_LARGEFILE, mode);
}

ssize_t write(int fd, const void* data, size_t size) {
  if (write_fails(kWrite, fd, data, size, -1)) return -1;
  return ::syscall(SYS_write, fd, data, size);
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (write_fails(kPwrite, fd, data, size, offset)) return -1;
  return ::syscall(SYS_pwrite64, fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) { return pwrite(fd, data, size, offset); }

int linkat(int from, const char* path, int to, const char* name, int flags) noexcept {
  if (counting && fails(kLinkat, place_of_path_at(to, name))) return -1;
  return static_cast<int>(::syscall(SYS_linkat, from, path, to, name, flags));
}

int rename(const char* from, const char* to) noexcept {
  if (counting && fails(kRename, place_of_path(to))) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

int fsync(int fd) {
  if (counting && fails(kFsync, place_of_file(fd))) return -1;
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

int socket(int domain, int type, int protocol) noexcept {
  if (counting && fails(kSocket, kOther)) return -1;
  return static_cast<int>(::syscall(SYS_socket, domain, type, protocol));
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  if (counting && fails(kUnlinkat, place_of_path_at(folder, path))) return -1;
  return static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}

}  // extern "C"
