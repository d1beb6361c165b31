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

// Everything about a DTensor but its data: where it lives, how it is laid out, and its global geometry. Interned: two
// tensors alike share one Spec, so that `id` stands for all of it in a cache key. Immutable; safe from any thread.
struct Spec {
  uint64_t id = 0;  // never reused in this process
  DeviceMesh mesh;
  Placements placements;         // normalized, one a mesh dimension
  std::vector<int64_t> sizes;    // global
  std::vector<int64_t> strides;  // global, in elements, as one process would have them
  at::ScalarType dtype;
  Tile tile;                         // the part of the global tensor that this rank holds; empty outside the mesh
  std::vector<int64_t> local_sizes;  // its sizes; {0} outside the mesh
  bool sharded = false;              // any Shard
  bool partial = false;              // any Partial

  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t numel() const;
  int64_t local_numel() const;
  // The rank's local size along `tensor_dim` when the tensor is sharded there, else the global one.
  int64_t local_size(int64_t tensor_dim) const { return local_sizes.at(static_cast<std::size_t>(tensor_dim)); }
};
using SpecPtr = std::shared_ptr<const Spec>;

// The Spec of these properties, made or found. `placements` must be normalized. Throws std::invalid_argument when they
// do not fit `sizes` (see check_layout), on every rank alike.
SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes,
                    at::IntArrayRef strides, at::ScalarType dtype);
// The same with row-major strides.
SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes, at::ScalarType dtype);
// Of a plain tensor taken as replicated over `mesh`.
SpecPtr replicated_spec(const DeviceMesh& mesh, const at::Tensor& plain);
// `spec` with other placements.
SpecPtr with_placements(const Spec& spec, const Placements& placements);

// Specs alive now, for tests: dead ones leave the table.
std::size_t interned_specs();

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes);
// Strides of a dense tensor of `sizes` whose dimensions are ordered in memory as `local`'s are; expanded dimensions
// keep 0.
std::vector<int64_t> strides_like(at::IntArrayRef sizes, const at::Tensor& local);

// The same of this rank's piece, ordered as the global tensor is.
std::vector<int64_t> dense_strides(const Spec& spec);

// "Float [4, 8] on {tp: 2} as [S(0)]"
std::string to_string(const Spec& spec);

}  // namespace tessera
