#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"

namespace tessera {

// Is a folder that all ranks of one number of ranks share: rank 0 removes it when all have left.
class SharedFolder {
 public:
  explicit SharedFolder(const DeviceMesh& mesh) : mesh_(mesh) {
    const char* base = std::getenv("TEST_TMPDIR");
    path_ = std::string(base != nullptr ? base : "/tmp") + "/tessera_io_" + std::to_string(::getppid()) + "_" +
            std::to_string(mesh.world().size());
    std::filesystem::create_directories(path_);
    wait();
  }
  ~SharedFolder() {
    wait();
    if (mesh_.world().rank() == 0) std::filesystem::remove_all(path_);
  }
  void wait() const {
    for (int64_t dim = 0; dim < mesh_.ndim(); ++dim) barrier(mesh_, dim);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  DeviceMesh mesh_;
  std::string path_;
};

}  // namespace tessera
