#include "tessera/mesh/job_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/mesh/core/stable_hash.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(5);
constexpr const char* kLockName = "lock";

std::string lock_name(const std::string& folder) { return folder + "/" + kLockName; }

// Makes `path` with mode 0700. If it exists, checks that it is a folder of this user that nobody else may enter.
void make_private(const std::string& path) {
  if (mkdir(path.c_str(), S_IRWXU) == 0) return;
  if (errno != EEXIST) {
    throw std::runtime_error(
        fmt::format("cannot make folder {} for the ranks to meet in: {}; set TESSERA_STORE to a path in a folder that "
                    "you can write",
                    path, std::strerror(errno)));
  }
  struct stat status {};
  if (lstat(path.c_str(), &status) != 0) {
    throw std::runtime_error(fmt::format("cannot look at folder {}: {}", path, std::strerror(errno)));
  }
  if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw std::runtime_error(
        fmt::format("{} is not a folder of mode 0700 of this user; remove it, or set TESSERA_STORE to a path at which "
                    "there is nothing",
                    path));
  }
}

// Refuses a folder of somebody's files: the first process of a job empties it.
void check_own_content(const std::string& path) {
  // The lock is made before any other file and removed after them.
  if (fs::is_empty(path) || fs::exists(lock_name(path))) return;
  throw std::runtime_error(fmt::format(
      "{} holds other files; set TESSERA_STORE to a path at which there is nothing: the ranks make a folder there",
      path));
}

}  // namespace

std::string folder_of_job(const std::string& job_id) {
  const char* const temporary = std::getenv("TMPDIR");
  const std::string root = temporary != nullptr && *temporary != '\0' ? temporary : "/tmp";
  const std::string user = fmt::format("{}/tessera-{}", root, geteuid());
  make_private(user);
  return fmt::format("{}/{:016x}", user, stable_hash(job_id));
}

JobFolder::JobFolder(std::string path, std::chrono::milliseconds patience) : path_(std::move(path)), owner_(getpid()) {
  const Clock::time_point deadline = Clock::now() + patience;
  do {
    make_private(path_);
    check_own_content(path_);
  } while (!open_lock() || !share_lock(deadline));
  folder_ = open(path_.c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC);
  if (folder_ >= 0) return;
  const std::string reason = std::strerror(errno);
  close(lock_);
  throw std::runtime_error(fmt::format("cannot open folder {}: {}", path_, reason));
}

// Returns false when the last holder has removed the folder meanwhile.
bool JobFolder::open_lock() {
  lock_ = open(lock_name(path_).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
  if (lock_ >= 0) return true;
  if (errno == ENOENT) return false;
  throw std::runtime_error(fmt::format("cannot open {}: {}", lock_name(path_), std::strerror(errno)));
}

// Takes the shared lock. Returns false when the last holder has removed the folder meanwhile.
bool JobFolder::share_lock(Clock::time_point deadline) {
  // A process that gets the exclusive lock is alone in the folder, so its files are left from an earlier job. Two
  // processes may both empty it: neither has written a file yet, since each writes only under the shared lock.
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0) remove_content();
  while (flock(lock_, LOCK_SH | LOCK_NB) != 0) {
    if (Clock::now() >= deadline) {
      close(lock_);
      throw std::runtime_error(
          fmt::format("timed out waiting for the lock of {}: a process that starts or ends has stopped", path_));
    }
    std::this_thread::sleep_for(kLook);
  }
  struct stat opened {};
  struct stat there {};
  if (fstat(lock_, &opened) == 0 && stat(lock_name(path_).c_str(), &there) == 0 && opened.st_ino == there.st_ino &&
      opened.st_dev == there.st_dev) {
    return true;
  }
  close(lock_);
  lock_ = -1;
  return false;
}

bool JobFolder::is_there() const {
  struct stat opened {};
  struct stat there {};
  return fstat(folder_, &opened) == 0 && stat(path_.c_str(), &there) == 0 && opened.st_ino == there.st_ino &&
         opened.st_dev == there.st_dev;
}

void JobFolder::remove_content() const noexcept {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path_, ignored)) {
    if (entry.path().filename() != kLockName) fs::remove_all(entry.path(), ignored);
  }
}

JobFolder::~JobFolder() {
  close(folder_);
  // A forked process shares the lock itself, so it must not change it.
  if (getpid() == owner_ && flock(lock_, LOCK_EX | LOCK_NB) == 0) {
    remove_content();
    unlink(lock_name(path_).c_str());
    rmdir(path_.c_str());
  }
  close(lock_);
}

}  // namespace tessera
