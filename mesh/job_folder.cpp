#include "tessera/mesh/job_folder.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "tessera/mesh/core/poll.h"
#include "tessera/mesh/core/same_file.h"
#include "tessera/mesh/core/stable_hash.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kNameLength = 16;  // of a job's folder, in hexadecimal digits

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
    if (errno == ENOENT) return make_private(path);  // its last process has removed it meanwhile
    throw std::runtime_error(fmt::format("cannot look at folder {}: {}", path, std::strerror(errno)));
  }
  if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw std::runtime_error(
        fmt::format("{} is not a folder of mode 0700 of this user; remove it, or set TESSERA_STORE to a path at which "
                    "there is nothing",
                    path));
  }
}

// Returns the names in an open folder; what the system cannot tell is left out.
std::vector<std::string> names_in(int folder) {
  std::vector<std::string> names;
  const int copy = openat(folder, ".", O_DIRECTORY | O_RDONLY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(copy < 0 ? nullptr : fdopendir(copy), closedir);
  if (!stream) {
    if (copy >= 0) close(copy);
    return names;
  }
  while (const dirent* const entry = readdir(stream.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

bool all_of(std::string_view text, int (*is)(int)) {
  return !text.empty() && std::ranges::all_of(text, [&](char c) { return is(static_cast<unsigned char>(c)) != 0; });
}

void remove_store_files(int folder) {
  for (const std::string& name : names_in(folder)) {
    if (is_store_file(name)) unlinkat(folder, name.c_str(), 0);
  }
}

// Says whether processes of all hosts that see the folder see each other's locks: on a network file system a lock of a
// folder stays on its host.
bool has_locks_for_all(int folder) {
  static constexpr std::array<int64_t, 8> kLocal = {TMPFS_MAGIC,           RAMFS_MAGIC,       EXT4_SUPER_MAGIC,
                                                    XFS_SUPER_MAGIC,       BTRFS_SUPER_MAGIC, F2FS_SUPER_MAGIC,
                                                    OVERLAYFS_SUPER_MAGIC, 0x2fc12fc1 /* ZFS */};
  struct statfs status {};
  return fstatfs(folder, &status) == 0 && std::ranges::find(kLocal, int64_t{status.f_type}) != kLocal.end();
}

// Removes the folders of jobs whose processes have all ended and could not remove it, since they were killed. A process
// that comes to such a folder meanwhile finds it gone, and makes it again.
void remove_abandoned(const std::string& user) {
  const int parent = open(user.c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (parent < 0) return;
  const std::vector<std::string> names = has_locks_for_all(parent) ? names_in(parent) : std::vector<std::string>();
  for (const std::string& name : names) {
    if (name.size() != kNameLength || !all_of(name, std::isxdigit)) continue;
    const int folder = openat(parent, name.c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (folder < 0) continue;
    if (flock(folder, LOCK_EX | LOCK_NB) == 0 && names_file(user + "/" + name, folder)) {
      remove_store_files(folder);
      unlinkat(parent, name.c_str(), AT_REMOVEDIR);  // fails where it holds other files
    }
    close(folder);
  }
  close(parent);
}

}  // namespace

// A key's file is KEY@VERSION, where KEY has letters, digits and a few signs; the others are .NUMBER.NUMBER.
bool is_store_file(const std::string& name) {
  if (name.starts_with('.')) {
    const std::size_t dot = name.find('.', 1);
    return dot != std::string::npos && all_of(std::string_view(name).substr(1, dot - 1), std::isxdigit) &&
           all_of(std::string_view(name).substr(dot + 1), std::isdigit);
  }
  const std::size_t at = name.rfind('@');
  return at != std::string::npos && all_of(std::string_view(name).substr(at + 1), std::isdigit) &&
         std::ranges::all_of(name.substr(0, at),
                             [](unsigned char c) { return std::isalnum(c) != 0 || std::strchr("%-_~", c) != nullptr; });
}

std::string folder_of_job(const std::string& job_id) {
  const char* const temporary = std::getenv("TMPDIR");
  const std::string root = temporary != nullptr && *temporary != '\0' ? temporary : "/tmp";
  const std::string user = fmt::format("{}/tessera-{}", root, geteuid());
  make_private(user);
  remove_abandoned(user);
  return fmt::format("{}/{:0{}x}", user, stable_hash(job_id), kNameLength);
}

JobFolder::JobFolder(std::string path, std::chrono::milliseconds patience) : path_(std::move(path)), owner_(getpid()) {
  const Clock::time_point deadline = Clock::now() + patience;
  try {
    do {
      close_folder();
      make_private(path_);
    } while (!open_folder() || !share_lock(deadline));
  } catch (...) {
    close_folder();
    throw;
  }
}

// Returns false when the last holder has removed the folder meanwhile.
bool JobFolder::open_folder() {
  folder_ = open(path_.c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (folder_ >= 0 || errno == ENOENT) return folder_ >= 0;
  throw std::runtime_error(fmt::format("cannot open folder {}: {}", path_, std::strerror(errno)));
}

// Takes the shared lock. Returns false when the last holder has removed the folder meanwhile.
bool JobFolder::share_lock(Clock::time_point deadline) {
  // A process that has the lock alone is the first, so the files are left from an earlier job. Two processes may both
  // remove them: neither has written a file yet, since each writes only under the shared lock.
  if (flock(folder_, LOCK_EX | LOCK_NB) == 0 && is_there()) {
    const std::vector<std::string> names = names_in(folder_);
    if (const auto other = std::ranges::find_if_not(names, is_store_file); other != names.end()) {
      throw std::runtime_error(fmt::format(
          "{} holds other files, such as {}; set TESSERA_STORE to a path at which there is nothing: the ranks make a "
          "folder there",
          path_, *other));
    }
    remove_store_files(folder_);
  }
  if (!poll_until(deadline, [&] { return flock(folder_, LOCK_SH | LOCK_NB) == 0; })) {
    throw std::runtime_error(
        fmt::format("timed out waiting for the lock of {}: a process that starts or ends has stopped; end the "
                    "processes that have it open (fuser {}), or set TESSERA_STORE to another path",
                    path_, path_));
  }
  return is_there();
}

bool JobFolder::is_there() const { return names_file(path_, folder_); }

void JobFolder::close_folder() {
  if (folder_ >= 0) close(folder_);
  folder_ = -1;
}

JobFolder::~JobFolder() {
  // A forked process shares the lock itself, so it must not change it.
  if (getpid() == owner_) {
    if (flock(folder_, LOCK_EX | LOCK_NB) == 0 && is_there()) {
      remove_store_files(folder_);
      rmdir(path_.c_str());
    }
    flock(folder_, LOCK_UN);  // also where a forked process still has the folder open
  }
  close_folder();
}

}  // namespace tessera
