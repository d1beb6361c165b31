#pragma once

#include <string>

#include "tessera/dtensor/io/file_descriptor.h"

namespace tessera {

// Keeps a second save away from the files of one that runs, of this job or another: without it each could remove what
// the other has just written. It holds the lock of a file ".<name>.lock" beside the checkpoint, which the system
// releases when the process ends, and removes that file at the end. Does nothing on a file system without locks.
class SaveLock {
 public:
  // Throws std::runtime_error when another save to `path` runs, or the file cannot be made.
  explicit SaveLock(const std::string& path);
  ~SaveLock();
  SaveLock(SaveLock&&) noexcept = default;
  SaveLock& operator=(SaveLock&&) = delete;

 private:
  bool take();

  std::string lock_path_;
  FileDescriptor file_;
};

}  // namespace tessera
