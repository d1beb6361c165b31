#include "tessera/dtensor/io/file_descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fmt/format.h>

namespace tessera {
namespace {

// Linux reads at most 2 GiB - 4 KiB in one call.
constexpr int64_t kLargestRead = int64_t{1} << 30;
constexpr int64_t kWrittenBack = int64_t{8} << 20;

}  // namespace

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void FileDescriptor::close(const std::string& path) {
  if (fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) throw_errno("close", path);
}

FileDescriptor open_regular_file(const std::string& path, int64_t& file_bytes) {
  // O_NONBLOCK is needed since opening a pipe would wait for its writer; it changes nothing for a regular file.
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) throw_errno("open", path);
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) throw_errno("examine", path);
  if (!S_ISREG(status.st_mode))
    throw std::invalid_argument(fmt::format("'{}' is not a regular file; name a .safetensors file", path));
  file_bytes = status.st_size;
  return file;
}

void read_at(const FileDescriptor& file, const std::string& path, int64_t position, int64_t count, void* to) {
  auto* at = static_cast<char*>(to);
  while (count > 0) {
    const ssize_t got = ::pread(file.get(), at, static_cast<std::size_t>(std::min(count, kLargestRead)), position);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("read", path);
    if (got == 0)
      throw std::runtime_error(fmt::format("'{}' ended at byte {}; it was cut off while it was read", path, position));
    at += got;
    position += got;
    count -= got;
  }
}

void write_at(const FileDescriptor& file, const std::string& path, int64_t position, const char* data, int64_t count) {
  while (count > 0) {
    const ssize_t done = ::pwrite(file.get(), data, static_cast<std::size_t>(count), position);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_errno("write", path);
    data += done;
    position += done;
    count -= done;
  }
}

void begin_write_back(const FileDescriptor& file, int64_t position, int64_t count) {
  ::sync_file_range(file.get(), position, count, SYNC_FILE_RANGE_WRITE);
}

void WriteBack::wrote(const FileDescriptor& file, int64_t position, int64_t count) {
  begin_ = bytes_ == 0 ? position : std::min(begin_, position);
  end_ = bytes_ == 0 ? position + count : std::max(end_, position + count);
  bytes_ += count;
  if (bytes_ < kWrittenBack) return;
  begin_write_back(file, begin_, end_ - begin_);
  bytes_ = 0;
}

void throw_errno(const std::string& action, const std::string& path) {
  const int error = errno;  // before anything changes it
  throw std::system_error(error, std::generic_category(), fmt::format("cannot {} '{}'", action, path));
}

void throw_too_many_open(const std::string& path, std::size_t files) {
  throw std::system_error(
      EMFILE, std::generic_category(),
      fmt::format("cannot open '{}', one of {} files that are open at once; let a process open more (`ulimit -n`), or "
                  "save with a larger max_shard_bytes, which makes fewer files",
                  path, files));
}

}  // namespace tessera
