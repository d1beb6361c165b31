#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// Tests redistribution between every two layouts against the value itself.
namespace tessera::testing {

struct Pair {
  Placements from;
  Placements to;
};

// Returns the layouts that a mesh of `mesh_shape` can have of a 2-D tensor of `shape`: every legal list of the built-in
// placements, chunks in two orders, a RaggedShard and an IntervalShard over all mesh dimensions together; another
// IntervalShard is in the lists only on the last mesh dimension.
std::vector<Placements> built_in_layouts(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape);
// Returns the layouts that integers can have, with bitwise reductions among them.
std::vector<Placements> integer_layouts(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape);
std::vector<Pair> all_pairs(const std::vector<Placements>& layouts);
// Returns `count` pairs, drawn by a generator of `seed`.
std::vector<Pair> some_pairs(const std::vector<Placements>& layouts, int64_t count, uint32_t seed);

// Redistributes a tensor of value `whole` from one layout to the other and back. Checks the layout, that the value is
// the same bit by bit, that the source was not written, and that another layout has memory of its own. Every rank of
// `mesh` calls it. Throws std::runtime_error that names pair, shape and mesh. A value that comes out of a pending
// reduction may differ by `tolerance` of the largest magnitude.
void check_pair(const Pair& pair, const at::Tensor& whole, const DeviceMesh& mesh, double tolerance = 0);
// Checks in the same way that the gradient has the source's layout and the right value.
void check_gradient(const Pair& pair, const std::vector<int64_t>& shape, const DeviceMesh& mesh);
// Does both for tensors of `shape`, and each thing that it checks is an assertion; integers have no gradients. A rank
// stops at the first one that fails, since the others would wait for it in the next collective.
void check_pairs(const std::vector<Pair>& pairs, const std::vector<int64_t>& shape, const DeviceMesh& mesh,
                 at::ScalarType dtype = at::kDouble);

// These are even, uneven, smaller than the mesh, of one element, and empty.
inline const std::vector<std::vector<int64_t>> kShapes = {{8, 4}, {7, 5}, {3, 2}, {1, 1}, {0, 3}};
// Does the same on ranks that are threads.
void check_in_process(const std::vector<Pair>& pairs, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& mesh_shape, at::ScalarType dtype = at::kDouble);

}  // namespace tessera::testing
