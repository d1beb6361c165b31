#include "tessera/mesh/spare_descriptor.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

namespace tessera {
namespace {

int open_one() noexcept { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

SpareDescriptor::SpareDescriptor() noexcept : fd_(open_one()) {}

SpareDescriptor::~SpareDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

// Returns 0 if this process has a descriptor left besides this one, else the system's reason.
int SpareDescriptor::look() noexcept {
  const int fd = open_one();
  if (fd < 0) return errno;
  if (fd_ < 0 && loans_ == 0) {
    fd_ = fd;
  } else {
    ::close(fd);
  }
  return 0;
}

void SpareDescriptor::give() noexcept {
  const std::lock_guard lock(mutex_);
  const int reason = look();
  ++loans_;
  if (reason == 0 || fd_ < 0) return;
  ::close(fd_);
  fd_ = -1;
  error_ = reason;
}

void SpareDescriptor::take() noexcept {
  const std::lock_guard lock(mutex_);
  if (--loans_ > 0) return;
  error_ = 0;
  if (fd_ < 0) fd_ = open_one();
}

std::string SpareDescriptor::what_is_lacking() {
  const std::lock_guard lock(mutex_);
  const int reason = error_ != 0 ? error_ : look();
  if (reason == 0) return "";
  return fmt::format("this process has no file descriptor left ({}); raise the limit (ulimit -n) or close files",
                     std::strerror(reason));
}

}  // namespace tessera
