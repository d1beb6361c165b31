#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/failing.h"

namespace tessera::detail {

// Holds this rank's part of one gradient.
struct LocalGradient {
  at::Tensor piece;  // shares memory with the gradient
  // The gradient's mesh in LocalGradients::meshes, and the mesh dimensions that cut it; none for a plain gradient,
  // which every rank has for itself.
  std::optional<std::size_t> mesh;
  std::vector<bool> is_cut;
};

struct LocalGradients {
  std::vector<DeviceMesh> meshes;  // of all parameters and gradients, in order of appearance
  // Says for each mesh which of its dimensions cut a gradient, or a parameter that requires one: on another rank its
  // gradient may be defined.
  std::vector<std::vector<bool>> cut;
  std::vector<LocalGradient> gradients;

  // Returns the World of `stages`, or else of the meshes; nullptr where there are neither.
  World* world(const std::optional<DeviceMesh>& stages) const {
    if (stages) return &stages->world();
    return meshes.empty() ? nullptr : &meshes.front().world();
  }
};

// Returns the gradients of `parameters` that are defined on this rank. What is pending in a gradient is reduced first,
// into the parameter's layout, together for all gradients of a mesh, and becomes the parameter's .grad; backward leaves
// nothing pending. A gradient that shares memory with another one is replaced by a copy. A tensor that is listed twice
// counts once. Ranks outside a gradient's mesh have none. Communicates under `op` for what is pending only. Throws
// std::invalid_argument on an undefined parameter, and on a gradient that is not dense.
LocalGradients local_gradients(const std::vector<at::Tensor>& parameters, const char* op);

// Returns what `body` returns, which looks at this rank's stage alone. An exception in it may be of this stage alone:
// if there are other stages, it fails the job, and is thrown on.
template <typename Body>
auto on_own_stage(const std::optional<DeviceMesh>& stages, const char* op, const Body& body) {
  return stages && stages->size() > 1 ? failing(stages->world(), op, body) : body();
}

// Returns the pieces that have elements, those of one device and dtype together: LibTorch's fused operators take lists
// of such tensors.
std::vector<std::vector<at::Tensor>> alike(const std::vector<LocalGradient>& gradients);

}  // namespace tessera::detail
