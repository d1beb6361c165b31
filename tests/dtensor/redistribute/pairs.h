#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// Redistribution between every two layouts, checked against the value itself.
namespace tessera::testing {

struct Pair {
  Placements from;
  Placements to;
};

// What a mesh of `mesh_shape` may hold of a tensor of `shape`, two dimensions of it: every list of the built-in
// placements that is legal, chunks in two orders, and a RaggedShard and an IntervalShard over all mesh dimensions
// together.
std::vector<Placements> built_in_layouts(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape);
// Likewise of the kinds that integers have; bits among them.
std::vector<Placements> integer_layouts(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape);
std::vector<Pair> all_pairs(const std::vector<Placements>& layouts);
// `count` of them, drawn by a generator of `seed`.
std::vector<Pair> some_pairs(const std::vector<Placements>& layouts, int64_t count, uint32_t seed);

// On every rank of `mesh`: redistributes a tensor of value `whole` from one to the other and back, and checks that it
// is laid out as asked, that its value has stayed, bit by bit, and that the source was not written. Throws
// std::runtime_error that names pair, shape and mesh.
void check_pair(const Pair& pair, const at::Tensor& whole, const DeviceMesh& mesh);
// Likewise that the gradient comes back as it went.
void check_gradient(const Pair& pair, const std::vector<int64_t>& shape, const DeviceMesh& mesh);
// Both, of tensors of `shape`; integers have no gradients.
void check_pairs(const std::vector<Pair>& pairs, const std::vector<int64_t>& shape, const DeviceMesh& mesh,
                 at::ScalarType dtype = at::kDouble);

// Even, uneven, smaller than the mesh, one, none.
inline const std::vector<std::vector<int64_t>> kShapes = {{8, 4}, {7, 5}, {3, 2}, {1, 1}, {0, 3}};
// The same on ranks that are threads.
void check_in_process(const std::vector<Pair>& pairs, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& mesh_shape, at::ScalarType dtype = at::kDouble);

}  // namespace tessera::testing
