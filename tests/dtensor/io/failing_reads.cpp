#include "tessera/tests/dtensor/io/failing_reads.h"

#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

std::atomic<const FailingReads*> living{nullptr};

}  // namespace

FailingReads::FailingReads(std::string part, int error) : FailingReads(std::move(part), [error] { return error; }) {}

FailingReads::FailingReads(std::string part, std::function<int()> before)
    : part_(std::move(part)), before_(std::move(before)) {
  living = this;
}

FailingReads::~FailingReads() { living = nullptr; }

bool FailingReads::fails(int fd) const {
  std::error_code ignored;
  const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored);
  if (path.string().find(part_) == std::string::npos) return false;
  const int error = before_();
  if (error == 0) return false;
  errno = error;
  return true;
}

}  // namespace tessera

// Takes the place of the C library's function.
extern "C" __attribute__((visibility("default"))) ssize_t pread(int fd, void* to, std::size_t count, off_t offset) {
  const tessera::FailingReads* const failing = tessera::living;
  if (failing != nullptr && failing->fails(fd)) return -1;
  return ::syscall(SYS_pread64, fd, to, count, offset);
}
