#include "tessera/dtensor/io/save_lock.h"

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/mesh/core/same_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr auto kPatience = std::chrono::milliseconds(200);

std::string lock_of(const std::string& path) {
  return (fs::path(folder_of(path)) / fmt::format(".{}.lock", fs::path(path).filename().string())).string();
}

}  // namespace

SaveLock::SaveLock(const std::string& path, bool alone) : lock_path_(lock_of(path)) {
  // A save that ends holds the lock alone for a moment.
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!take(alone)) {
    if (errno != EWOULDBLOCK) continue;  // the last holder has removed the file meanwhile
    if (std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    throw std::runtime_error(fmt::format(
        "saving to '{}': another save to it runs, of this job or another; give each job a path of its own", path));
  }
}

// Returns false, with errno EWOULDBLOCK, if another save holds the lock, and with errno 0 if the file is gone again.
bool SaveLock::take(bool alone) {
  file_ = FileDescriptor(::open(lock_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file_.is_open()) return true;  // nothing can be saved there; the writer says why
  if (::flock(file_.get(), (alone ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) return errno != EWOULDBLOCK;
  const bool has_name = names_file(lock_path_, file_.get());
  errno = 0;
  return has_name;
}

SaveLock::~SaveLock() { release(); }

void SaveLock::release() noexcept {
  if (file_.is_open() && ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 && names_file(lock_path_, file_.get())) {
    ::unlink(lock_path_.c_str());
  }
  file_ = FileDescriptor();
}

}  // namespace tessera
