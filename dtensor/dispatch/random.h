#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera::detail {

// This rank's coordinate on the mesh dimensions that split a tensor of `placements`, -1 on the others, whose ranks draw alike.
// Empty outside the mesh.
std::vector<int64_t> draw_coordinate(const DeviceMesh& mesh, const Placements& placements);

// While it lives, the device's default generator is a fresh one with this key; afterwards it is as it was. Moves the world's
// counter on by one.
class DrawGuard {
 public:
  // `coordinate`: -1 on mesh dimensions whose ranks draw alike. `user` is the caller's generator, which gives a key of its own.
  DrawGuard(const DeviceMesh& mesh, const std::vector<int64_t>& coordinate, const std::optional<at::Generator>& user);
  ~DrawGuard();
  DrawGuard(const DrawGuard&) = delete;
  DrawGuard& operator=(const DrawGuard&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> drawing_;  // one rank of this process draws at a time
  at::Generator generator_;
  at::Tensor saved_;
};

}  // namespace tessera::detail
