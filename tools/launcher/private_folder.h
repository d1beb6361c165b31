#pragma once

#include <string>

namespace tessera {

// Makes a new folder that only this user can enter. The destructor removes it with its content.
class PrivateFolder {
 public:
  // Makes it in TEST_TMPDIR, else TMPDIR, else /tmp. Throws std::runtime_error when it cannot be made.
  PrivateFolder();
  ~PrivateFolder();
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace tessera
