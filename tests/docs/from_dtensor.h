#pragma once

#include <functional>
#include <memory>

#include <ATen/ops/arange.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/placement/placement.h"

// Holds what the two tests of the page "Coming from PyTorch's DTensor" share.
namespace from_dtensor {

inline const tessera::Placement R = tessera::Replicate(), S0 = tessera::Shard(0), S1 = tessera::Shard(1);

// Runs `body` on four ranks, on {dp: 2, tp: 2}.
inline void on_mesh(const std::function<void(const tessera::DeviceMesh& mesh)>& body) {
  tessera::run_in_process(4, [&](const std::shared_ptr<tessera::World>& world) {
    body(tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world));
  });
}

inline at::Tensor numbers() { return at::arange(24.0).view({4, 6}); }

}  // namespace from_dtensor
