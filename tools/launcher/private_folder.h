#pragma once

#include <string>

namespace tessera {

// A new folder that only this user can enter, removed with all that is in it when the object dies.
class PrivateFolder {
 public:
  // Made under TEST_TMPDIR, else TMPDIR, else /tmp. Throws std::runtime_error when it cannot be made.
  PrivateFolder();
  ~PrivateFolder();
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace tessera
