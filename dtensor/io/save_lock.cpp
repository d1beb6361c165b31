#include "tessera/dtensor/io/save_lock.h"

#include <cerrno>
#include <filesystem>
#include <stdexcept>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/dtensor/io/atomic_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string lock_of(const std::string& path) {
  return (fs::path(folder_of(path)) / fmt::format(".{}.lock", fs::path(path).filename().string())).string();
}

}  // namespace

SaveLock::SaveLock(const std::string& path, bool alone) : lock_path_(lock_of(path)) {
  while (!take(alone)) {
    if (errno != EWOULDBLOCK) continue;  // the last holder has removed the file meanwhile
    throw std::runtime_error(fmt::format(
        "saving to '{}': another save to it runs, of this job or another; give each job a path of its own", path));
  }
}

// Returns false, with errno EWOULDBLOCK, if another save holds the lock, and with errno 0 if the file is gone again.
bool SaveLock::take(bool alone) {
  file_ = FileDescriptor(::open(lock_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file_.is_open()) throw_errno("make", lock_path_);
  if (::flock(file_.get(), (alone ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) return errno != EWOULDBLOCK;
  struct stat opened {};
  struct stat there {};
  const bool is_there = ::fstat(file_.get(), &opened) == 0 && ::stat(lock_path_.c_str(), &there) == 0 &&
                        opened.st_ino == there.st_ino && opened.st_dev == there.st_dev;
  errno = 0;
  return is_there;
}

SaveLock::~SaveLock() { release(); }

void SaveLock::release() noexcept {
  if (file_.is_open() && ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(lock_path_.c_str());
  file_ = FileDescriptor();
}

}  // namespace tessera
