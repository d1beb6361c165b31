#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Makes work that every rank does for itself succeed on all ranks or fail on all: a file that one rank cannot open
// gives the same exception on every rank, before any rank goes on.
class Agreement {
 public:
  // Communication is counted under `op` ("load_weights"). Without meshes every rank runs alone.
  Agreement(std::vector<DeviceMesh> meshes, const char* op) : meshes_(std::move(meshes)), op_(op) {}

  const std::vector<DeviceMesh>& meshes() const { return meshes_; }

  // Runs `part` here, and learns how it ended on the other ranks. `part` must not communicate, and Checked compares
  // nothing in it. If it failed on some, every rank of the meshes throws what the lowest failed rank threw:
  // std::invalid_argument for that and for any std::logic_error, else std::runtime_error. The text names the rank,
  // unless all failed. `fingerprint` is called after `part`; where ranks return different ones, every rank throws
  // std::invalid_argument that starts with op and says `differ`.
  //
  // Communication: one all-reduce of 40 bytes per mesh dimension (of several meshes: see max_over_meshes), and after a
  // failure one more of the text. A rank outside the meshes takes no part.
  void run(const std::function<void()>& part, const std::function<std::string()>& fingerprint = nullptr,
           const char* differ =
               "the ranks were called with different arguments; every rank must pass the same names, shapes, "
               "dtypes and options") const;

 private:
  at::Tensor reduce_max(const at::Tensor& values) const;
  [[noreturn]] void throw_alike(int64_t first_rank, int64_t text_bytes, bool all_failed, const std::string& mine) const;

  std::vector<DeviceMesh> meshes_;
  const char* op_;
};

}  // namespace tessera
