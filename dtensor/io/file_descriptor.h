#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

// Owns an open file and closes it. It can be moved, not copied.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  // Closes the file now. Throws std::runtime_error when the system reports an error that it deferred until then.
  void close(const std::string& path);

 private:
  int fd_ = -1;
};

// Opens a file for reading and sets its size. Throws std::runtime_error when the system cannot, std::invalid_argument
// when it is a folder, pipe or device.
FileDescriptor open_regular_file(const std::string& path, int64_t& file_bytes);

// Reads bytes [position, position + count) into `to`. Throws std::runtime_error when the system cannot, or the file
// ends before.
void read_at(const FileDescriptor& file, const std::string& path, int64_t position, int64_t count, void* to);

// Writes the bytes to [position, position + count). Throws std::system_error when the system cannot.
void write_at(const FileDescriptor& file, const std::string& path, int64_t position, const char* data, int64_t count);

// Asks the system to begin to write bytes of the file to the disk, all from `position` on where `count` is 0. It may
// wait where the disk's queue is full, and fsync reports the errors of the disk. A file system that cannot do this does
// nothing.
void begin_write_back(const FileDescriptor& file, int64_t position, int64_t count);

// Lets the disk work while a file is written, so that fsync has less to wait for.
class WriteBack {
 public:
  // Notes that bytes were written, and calls begin_write_back for the last ones where they are 8 MiB.
  void wrote(const FileDescriptor& file, int64_t position, int64_t count);

 private:
  int64_t begin_ = 0, end_ = 0;  // the range in which the bytes are that no call has named
  int64_t bytes_ = 0;
};

// Throws std::system_error "cannot <action> '<path>': <errno's text>".
[[noreturn]] void throw_errno(const std::string& action, const std::string& path);

// Throws std::system_error that says that `path`, one of `files` files that are open at once, cannot be opened since
// the process has too many open, and what to do.
[[noreturn]] void throw_too_many_open(const std::string& path, std::size_t files);

}  // namespace tessera
