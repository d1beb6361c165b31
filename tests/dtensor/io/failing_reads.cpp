#include "tessera/tests/dtensor/io/failing_reads.h"

#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

std::atomic<const FailingReads*> living{nullptr};

}  // namespace

FailingReads::FailingReads(std::string part, int error) : part_(std::move(part)), error_(error) { living = this; }

FailingReads::~FailingReads() { living = nullptr; }

bool FailingReads::fails(int fd) const {
  std::error_code ignored;
  const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored);
  if (path.string().find(part_) == std::string::npos) return false;
  errno = error_;
  return true;
}

}  // namespace tessera

// Takes the place of the C library's function.
extern "C" __attribute__((visibility("default"))) ssize_t pread(int fd, void* to, std::size_t count, off_t offset) {
  const tessera::FailingReads* const failing = tessera::living;
  if (failing != nullptr && failing->fails(fd)) return -1;
  return ::syscall(SYS_pread64, fd, to, count, offset);
}
