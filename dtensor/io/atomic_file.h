#pragma once

#include <cstdint>
#include <string>

#include "tessera/dtensor/io/file_descriptor.h"

namespace tessera {

// A file that appears under its name all at once: written beside under a temporary name (".<name>.tmp-<random>",
// readable by its owner alone), then synced and renamed. Until publish() the old file of that name is untouched, also
// when the process is killed; without publish() the temporary file is removed. What an earlier process that was killed
// left behind for the same name is removed at the start (a live one holds a lock on its file).
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
  // Puts the data on disk and gives the file its final mode: that of the file it replaces, else what the umask leaves.
  void sync();
  // Gives the file its name. After sync(). The folder is not synced: see sync_folder.
  void publish();

 private:
  std::string path_;
  std::string temporary_;  // empty once there is none
  FileDescriptor file_;
};

// Throws std::invalid_argument when `path` is there and is no regular file: a rename would replace a device, pipe or
// socket, and a symbolic link instead of what it points to.
void check_replaceable(const std::string& path);

// Puts the names in `folder` on disk. Throws std::runtime_error.
void sync_folder(const std::string& folder);

// The folder part of a path: "a/b" -> "a", "b" -> ".", "/b" -> "/".
std::string folder_of(const std::string& path);

}  // namespace tessera
