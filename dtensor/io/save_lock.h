#pragma once

#include <string>

#include "tessera/dtensor/io/file_descriptor.h"

namespace tessera {

// Keeps a second save away from the files of one that runs, of this job or another: without it each could remove what
// the other has just written. Saves of one file each may run at once, since that file appears whole, and the last one
// stays; a save of several files runs alone. It holds the lock of a file ".<name>.lock" beside the checkpoint, which
// the system releases when the process ends, and removes that file at the end. Does nothing on a file system without
// locks.
class SaveLock {
 public:
  // Throws std::runtime_error when another save to `path` runs that this one cannot run beside.
  SaveLock(const std::string& path, bool alone);
  ~SaveLock();
  SaveLock(SaveLock&&) noexcept = default;
  SaveLock& operator=(SaveLock&&) = delete;

  // Ends the lock, and removes its file unless others share it.
  void release() noexcept;

 private:
  bool take(bool alone);

  std::string lock_path_;
  FileDescriptor file_;
};

}  // namespace tessera
