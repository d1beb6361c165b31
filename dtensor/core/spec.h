#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Describes a DTensor without its data: the mesh, the layout, and the global sizes, strides and dtype.
//
// Invariants:
//   - It is immutable, and safe to read from any thread.
//   - Equal Specs that are alive at the same time are one object (intern_spec makes them), so `id` stands for all of it
//     in a cache key.
struct Spec {
  uint64_t id = 0;  // never reused in this process
  DeviceMesh mesh;
  Placements placements;         // normalized; one per mesh dimension
  std::vector<int64_t> sizes;    // global
  std::vector<int64_t> strides;  // global, in elements: those of the tensor in one process
  at::ScalarType dtype;
  Tile tile;                         // the part of the global tensor that this rank holds; empty outside the mesh
  std::vector<int64_t> local_sizes;  // its sizes; {0} outside the mesh
  bool sharded = false;              // some placement is a Shard
  bool partial = false;              // some placement is a Partial

  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t numel() const;
  int64_t local_numel() const;
  // Returns the piece's size along `tensor_dim`.
  int64_t local_size(int64_t tensor_dim) const { return local_sizes.at(static_cast<std::size_t>(tensor_dim)); }
};
using SpecPtr = std::shared_ptr<const Spec>;

// Returns the interned Spec of these properties. `placements` must be normalized. Throws std::invalid_argument, alike
// on every rank, when they do not fit `sizes` (see check_layout).
SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes,
                    at::IntArrayRef strides, at::ScalarType dtype);
// Does the same with row-major strides.
SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes, at::ScalarType dtype);
// Returns the Spec of a plain tensor that counts as replicated over `mesh`.
SpecPtr replicated_spec(const DeviceMesh& mesh, const at::Tensor& plain);
// Returns `spec` with other placements.
SpecPtr with_placements(const Spec& spec, const Placements& placements);

// Returns the number of Specs that are alive, for tests.
std::size_t interned_specs();

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes);
// Returns the strides of a dense tensor of `sizes` whose dimensions have the order in memory that `local`'s have; an
// expanded dimension (stride 0) keeps 0.
std::vector<int64_t> strides_like(at::IntArrayRef sizes, const at::Tensor& local);

// Returns the strides of this rank's piece when it is dense and its dimensions have the global tensor's order in
// memory.
std::vector<int64_t> dense_strides(const Spec& spec);

// Returns the bytes of one rank's piece of such a tensor laid out as `placements`, as if every cut were even; it is the
// same on every rank.
int64_t bytes_of_even_piece(const Spec& spec, const Placements& placements);

// Returns "Float [4, 8] on {tp: 2} on cpu as [S(0)]".
std::string to_string(const Spec& spec);

}  // namespace tessera
