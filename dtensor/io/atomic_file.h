#pragma once

#include <cstdint>
#include <string>

#include "tessera/dtensor/io/file_descriptor.h"

namespace tessera {

// Writes a file that appears under its name all at once: written beside it under a temporary name
// (".<name>.tmp-<random>", readable by its owner alone), then synced and renamed. Until publish() the old file of that
// name is unchanged, also when the process is killed; without publish() the temporary file is removed. The constructor
// removes temporary files of the same name that killed processes left behind (a live process holds a lock on its file).
//
// Every member throws std::runtime_error with the path and the system's text when the system refuses. The constructor
// throws as check_replaceable does.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  const std::string& path() const { return path_; }
  void write(const void* data, int64_t count);
  // Writes the data to disk, and gives the file its final mode: that of the file it replaces, else the umask's default.
  void sync();
  // Gives the file its name. Call sync() before it, and sync_folder after it to write the name to disk.
  void publish();

 private:
  std::string path_;
  std::string temporary_;  // empty when there is no temporary file
  FileDescriptor file_;
  WriteBack write_back_;
  int64_t written_ = 0;  // bytes
};

// Throws std::invalid_argument when `path` exists and is not a regular file: a rename would replace a device, pipe or
// socket, and a symbolic link rather than its target.
void check_replaceable(const std::string& path);

// Writes the names in `folder` to disk. Throws std::runtime_error.
void sync_folder(const std::string& folder);

// Returns the folder part of a path: "a/b" -> "a", "b" -> ".", "/b" -> "/".
std::string folder_of(const std::string& path);

}  // namespace tessera
