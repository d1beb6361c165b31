#pragma once

#include <string>

#include "tessera/dtensor/io/file_descriptor.h"

namespace tessera {

// Stands for another process that takes a new file or folder of this one for abandoned. Just before this process locks
// the next one by flock(), it takes that lock itself; then it removes what it has locked, with its folder where that is
// a training state's, at once or in finish().
class OtherRemover {
 public:
  explicit OtherRemover(bool at_once);
  ~OtherRemover();
  OtherRemover(const OtherRemover&) = delete;
  OtherRemover& operator=(const OtherRemover&) = delete;

  // Returns the path of what it has locked; "" before that.
  const std::string& path() const { return path_; }
  void finish();

  // Is what flock() calls.
  void take(int fd);

 private:
  bool at_once_;
  std::string path_;
  FileDescriptor lock_;
};

}  // namespace tessera
