#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace tessera::testing {

// Makes a folder, names it in TMPDIR while it lives, and then removes it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-store-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
    setenv("TMPDIR", path_.c_str(), 1);
  }
  ~TemporaryFolder() {
    unsetenv("TMPDIR");
    std::filesystem::remove_all(path_);
  }
  std::string path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace tessera::testing
