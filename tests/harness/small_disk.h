#pragma once

#include <sys/mount.h>

#include <cerrno>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "tessera/tools/launcher/private_folder.h"

namespace tessera::testing {

// Mounts a file system of half a megabyte, which a test can fill.
class SmallDisk {
 public:
  SmallDisk() {
    if (::mount("tmpfs", folder_.path().c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "size=512k,mode=0700") == 0) return;
    why_not_ = fmt::format("a small file system cannot be mounted: {}", std::strerror(errno));
  }
  ~SmallDisk() {
    if (why_not_.empty()) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  const std::string& path() const { return folder_.path(); }
  // Returns why it could not be mounted, as text for TESSERA_SKIP_MISSING, or "".
  const std::string& why_not() const { return why_not_; }

 private:
  const PrivateFolder folder_;
  std::string why_not_;
};

}  // namespace tessera::testing
