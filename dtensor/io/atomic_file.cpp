#include "tessera/dtensor/io/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tessera/mesh/core/same_file.h"

namespace tessera {
namespace {

constexpr int64_t kLargestWrite = int64_t{8} << 20;
constexpr mode_t kModeBits = 07777;

std::string temporary_prefix(const std::string& path) {
  return fmt::format("{}/.{}.tmp-", folder_of(path), std::filesystem::path(path).filename().string());
}

// Reads the umask without umask(2), which has to change it, for all threads, to read it.
mode_t current_umask() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Umask:")) return static_cast<mode_t>(std::stoul(line.substr(6), nullptr, 8));
  }
  return 022;
}

mode_t final_mode(const std::string& path) {
  struct stat old = {};
  if (::lstat(path.c_str(), &old) == 0 && S_ISREG(old.st_mode)) return old.st_mode & kModeBits;
  return 0666 & ~current_umask();
}

const char* kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFLNK: return "a symbolic link";
    case S_IFDIR: return "a folder";
    case S_IFIFO: return "a pipe";
    case S_IFSOCK: return "a socket";
    default: return "a device";
  }
}

// Removes temporary files that nobody has locked: their processes ended before they could remove them.
void remove_abandoned(const std::string& path) {
  const std::string prefix = temporary_prefix(path);
  const std::string name_prefix = std::filesystem::path(prefix).filename().string();
  std::error_code ignored;
  for (const auto& item : std::filesystem::directory_iterator(folder_of(path), ignored)) {
    const std::string name = item.path().filename().string();
    if (!name.starts_with(name_prefix)) continue;
    const FileDescriptor file(::open(item.path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (file.is_open() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(item.path().c_str());
  }
}

std::string random_suffix() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

// Is how often a new name is tried, since a file system may fail to look at any.
constexpr int kMostTries = 100;

// Creates and locks a file of a new name. Before it is locked, another writer may take it for abandoned and remove it;
// then another file is made.
FileDescriptor create_locked(const std::string& path, std::string& temporary) {
  for (int tries = 0; tries < kMostTries; ++tries) {
    temporary = temporary_prefix(path) + random_suffix();
    FileDescriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file.is_open() && errno == EEXIST) continue;
    if (!file.is_open()) throw_errno("create a file to save", path);
    // Another writer that has the lock is about to remove the file. Every other failure is harmless: there are file
    // systems without locks.
    const bool is_theirs = ::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!is_theirs && names_file(temporary, file.get())) return file;
  }
  throw_errno("lock a file to save", temporary);
}

}  // namespace

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

void sync_folder(const std::string& folder) {
  FileDescriptor file(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!file.is_open()) throw_errno("open the folder", folder);
  // EINVAL means that the file system cannot sync folders.
  if (::fsync(file.get()) != 0 && errno != EINVAL) throw_errno("sync the folder", folder);
}

void check_replaceable(const std::string& path) {
  struct stat there = {};
  if (::lstat(path.c_str(), &there) != 0 || S_ISREG(there.st_mode)) return;
  throw std::invalid_argument(
      fmt::format("saving to '{}': it is {}, which a save would replace; {}", path, kind_of(there.st_mode),
                  S_ISLNK(there.st_mode) ? "name the file that it points to, or remove it" : "name a file"));
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  check_replaceable(path_);
  remove_abandoned(path_);
  file_ = create_locked(path_, temporary_);
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      file_(std::move(other.file_)),
      write_back_(other.write_back_),
      written_(other.written_) {}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, int64_t count) {
  const auto* at = static_cast<const char*>(data);
  while (count > 0) {
    const ssize_t done = ::write(file_.get(), at, static_cast<std::size_t>(std::min(count, kLargestWrite)));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_errno("write", path_);
    write_back_.wrote(file_, written_, done);
    at += done;
    written_ += done;
    count -= done;
  }
}

void AtomicFile::sync() {
  // Some file systems give all their files one mode, and refuse another.
  const bool is_set = ::fchmod(file_.get(), final_mode(path_)) == 0;
  if (!is_set && errno != EPERM && errno != ENOSYS && errno != EOPNOTSUPP) throw_errno("set the mode of", path_);
  if (::fsync(file_.get()) != 0) throw_errno("sync", path_);
}

void AtomicFile::publish() {
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) throw_errno("replace", path_);
  temporary_.clear();
  file_.close(path_);
}

}  // namespace tessera
