#include "tessera/mesh/job_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tessera {
namespace {

std::string lock_name(const std::string& folder) { return folder + "/lock"; }

// FNV-1a gives the same hash in every process and build, which std::hash does not promise.
uint64_t stable_hash(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

// Makes `path` with mode 0700. If it exists, checks that it is a folder of this user that nobody else may enter.
void make_private(const std::string& path) {
  if (mkdir(path.c_str(), S_IRWXU) == 0) return;
  if (errno != EEXIST) {
    throw std::runtime_error(fmt::format(
        "cannot make folder {} for the ranks to meet in: {}; set TESSERA_STORE to a file", path, std::strerror(errno)));
  }
  struct stat status {};
  if (lstat(path.c_str(), &status) != 0) {
    throw std::runtime_error(fmt::format("cannot look at folder {}: {}", path, std::strerror(errno)));
  }
  if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw std::runtime_error(
        fmt::format("{} is not a folder of mode 0700 of this user; remove it, or set TESSERA_STORE to a file that only "
                    "you can write",
                    path));
  }
}

}  // namespace

JobFolder::JobFolder(const std::string& job_id) {
  const char* const temporary = std::getenv("TMPDIR");
  const std::string root = temporary != nullptr && *temporary != '\0' ? temporary : "/tmp";
  const std::string user = fmt::format("{}/tessera-{}", root, geteuid());
  path_ = fmt::format("{}/{:016x}", user, stable_hash(job_id));
  make_private(user);
  while (true) {
    make_private(path_);
    if (lock()) return;
  }
}

// Takes the shared lock. Returns false when the last holder has removed the folder meanwhile.
bool JobFolder::lock() {
  lock_ = open(lock_name(path_).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
  if (lock_ < 0) {
    if (errno == ENOENT) return false;
    throw std::runtime_error(fmt::format("cannot open {}: {}", lock_name(path_), std::strerror(errno)));
  }
  // A process that gets the exclusive lock is alone in the folder, so its files are left from an earlier job. Two
  // processes may both empty it: neither has written a file yet, since each writes only under the shared lock.
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0) remove_content();
  const bool locked = flock(lock_, LOCK_SH) == 0;
  struct stat opened {};
  struct stat there {};
  if (locked && fstat(lock_, &opened) == 0 && stat(lock_name(path_).c_str(), &there) == 0 &&
      opened.st_ino == there.st_ino && opened.st_dev == there.st_dev) {
    return true;
  }
  close(lock_);
  lock_ = -1;
  return false;
}

void JobFolder::remove_content() const noexcept {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
    if (entry.path().filename() != "lock") std::filesystem::remove_all(entry.path(), ignored);
  }
}

JobFolder::~JobFolder() {
  if (lock_ < 0) return;
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0) {
    remove_content();
    unlink(lock_name(path_).c_str());
    rmdir(path_.c_str());
  }
  close(lock_);
}

}  // namespace tessera
