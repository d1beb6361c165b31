#pragma once

#include <string>

namespace tessera {

// Returns the folder for temporary files: TEST_TMPDIR, else TMPDIR, else /tmp.
std::string temporary_folder();

// Makes a new folder, tessera-owned-HOST-XXXXXX, that only this user can enter. HOST is a number that stands for this
// host. The destructor removes the folder with its content.
//
// While the object lives, its process holds a lock on the folder (flock). The kernel releases it when the process ends,
// however it ends, so that remove_abandoned_folders() knows the folders of processes that were killed.
class PrivateFolder {
 public:
  // Makes it in temporary_folder(), or in `parent`. Throws std::runtime_error when it cannot be made.
  PrivateFolder() : PrivateFolder(temporary_folder()) {}
  explicit PrivateFolder(const std::string& parent);
  ~PrivateFolder();
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;
};

// Removes the folders in `parent` that PrivateFolder objects of ended processes have left. Removes only folders of this
// user and this host with such a name, whose lock is free; follows no symbolic link. Leaves a folder on a file system
// without locks, and one that cannot be removed. Where hosts share `parent`, a lock may be seen on its own host alone:
// that is why the folders of other hosts stay.
void remove_abandoned_folders(const std::string& parent);

}  // namespace tessera
