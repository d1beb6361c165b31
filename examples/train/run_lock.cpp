#include "tessera/examples/train/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>

#include "tessera/mesh/core/same_file.h"

namespace train {
namespace {

constexpr std::chrono::seconds kPatience{3};

}  // namespace

RunLock::RunLock(const std::string& run)
    : run_(run), path_(run + "/.lock"), is_made_(std::filesystem::create_directories(run)) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!take()) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw std::invalid_argument(fmt::format(
          "another process is training in this folder: '{}'; wait until it ends, or give another --run", run_));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// Returns false if another process holds the lock, and if the last holder has removed the file meanwhile.
bool RunLock::take() {
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (file_ < 0) return true;  // whoever writes there says why
  const bool is_locked = ::flock(file_, LOCK_EX | LOCK_NB) == 0;
  if (!is_locked && errno != EWOULDBLOCK) return true;  // the file system has no locks
  if (is_locked && tessera::names_file(path_, file_)) return true;
  ::close(file_);
  return false;
}

RunLock::~RunLock() {
  if (file_ >= 0) {
    ::unlink(path_.c_str());
    ::close(file_);
  }
  if (is_made_) ::rmdir(run_.c_str());  // which removes no folder that has something in it
}

}  // namespace train
