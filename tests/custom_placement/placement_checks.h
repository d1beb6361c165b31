#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/placement/placement.h"

// Tests a placement of one's own: see docs/custom-placement.md.
namespace tessera::testing {

struct PlacementChecks {
  // Lists the shapes of the tensors, of two dimensions each. By default one is uneven, one smaller than most meshes,
  // one empty. Meshes of several dimensions take the first.
  std::vector<std::vector<int64_t>> shapes = {{7, 5}, {3, 2}, {0, 3}};
  std::vector<std::vector<int64_t>> meshes = {{1}, {2}, {3}, {4}, {2, 2}};
  // Default: float64, and int64 for a partition.
  std::vector<at::ScalarType> dtypes;
  // Makes the values of a tensor, the same on every rank. Default: whole numbers from 0 to 4, which are exact.
  std::function<at::Tensor(at::IntArrayRef shape, at::ScalarType dtype)> values;
  // Says by how much of the largest magnitude a value of a reduction may differ. A partition's pieces must be exact.
  double tolerance = 1e-12;
  // Says whether gradients are checked too.
  bool gradients = true;
};

// Redistributes tensors between `placement` and every built-in one, there and back: on the meshes of one dimension by
// itself, on those of more in lists with Replicate, Shard, Partial and itself, to and from every list of built-in
// placements that is possible there. Checks on every rank
//   - that the value stays, and that a partition's piece is what its part() says, bit by bit;
//   - on meshes of one dimension the gradient: for a partition of every such pair; for a reduction d value / d piece,
//     against differences.
// Ranks are threads of this process, so the function needs no launcher. What it links has doctest's main, so call it in
// a tessera_test. Throws std::runtime_error that names the layouts, shape, mesh and rank of the first difference, or
// what the library threw; std::invalid_argument when the placement cannot lay out a tensor of any of the shapes on a
// mesh.
void check_placement(const Placement& placement, const PlacementChecks& checks = {});

}  // namespace tessera::testing
