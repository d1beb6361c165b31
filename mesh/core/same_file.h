#pragma once

#include <string>

#include <sys/stat.h>

namespace tessera {

// Says whether `path` names the open file or folder `fd`, which somebody may have removed, renamed or replaced. A
// symbolic link does not count as the file that it leads to.
inline bool names_file(const std::string& path, int fd) {
  struct stat there {};
  struct stat opened {};
  return ::lstat(path.c_str(), &there) == 0 && ::fstat(fd, &opened) == 0 && there.st_dev == opened.st_dev &&
         there.st_ino == opened.st_ino;
}

}  // namespace tessera
