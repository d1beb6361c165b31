#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Work that each rank does for itself but that succeeds or fails on all of them: a file that one rank cannot open is
// the same exception on every rank, before any of them went on.
class Agreement {
 public:
  // `op` is charged with the communication ("load_weights"). Without meshes every rank is on its own.
  Agreement(std::vector<DeviceMesh> meshes, const char* op) : meshes_(std::move(meshes)), op_(op) {}

  const std::vector<DeviceMesh>& meshes() const { return meshes_; }

  // Runs `part` here and learns how it went elsewhere. Throws on every rank of the meshes what the lowest rank that
  // failed threw: std::invalid_argument for that and std::logic_error, else std::runtime_error; the rank is named
  // unless all failed. Ranks whose `fingerprint`, asked after `part`, is not the same get std::invalid_argument that
  // starts with op and says `differ`.
  //
  // One all-reduce of 40 bytes a mesh dimension (of several meshes: as many times as there are meshes), and after a
  // failure one more of the text. A rank outside the meshes hears nothing.
  void run(const std::function<void()>& part, const std::function<std::string()>& fingerprint = nullptr,
           const char* differ =
               "the ranks were called with different arguments; every rank must pass the same names, shapes, "
               "dtypes and options") const;

 private:
  at::Tensor reduce_max(at::Tensor values) const;
  [[noreturn]] void throw_alike(int64_t first_rank, int64_t text_bytes, bool all_failed, const std::string& mine) const;

  std::vector<DeviceMesh> meshes_;
  const char* op_;
};

}  // namespace tessera
