#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// Makes tensors that every rank of a test makes alike, and DTensors of them with different terms on every rank.
namespace tessera::testing {

// Return all ranks of this test's world as a mesh of that shape, with dimensions called d0, d1, ...; line() is 1-D.
DeviceMesh mesh_over(std::vector<int64_t> shape);
DeviceMesh line();
// Returns line(), and with four ranks also {2, 2}.
std::vector<DeviceMesh> meshes();

// Returns small whole numbers from 0 to 4, exact in every dtype.
at::Tensor whole_numbers(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble, int64_t seed = 0);
// Returns numbers in [-1, 1], no two alike.
at::Tensor sample(at::IntArrayRef shape, int64_t seed = 0, at::ScalarType dtype = at::kDouble);

// Makes a DTensor of value `whole` without communication. Ranks hold different terms where it is Partial.
at::Tensor spread(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);
// Return a copy of `t`, or spread(), as a leaf that requires a gradient.
at::Tensor leaf(const at::Tensor& t);
at::Tensor leaf(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);
// Returns this rank's piece of `whole`; Partial counts as Replicate.
at::Tensor piece_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);

// Returns every list of placements with one of `kinds` per mesh dimension, except those with pending reductions that do
// not commute.
std::vector<Placements> all_layouts(int64_t mesh_ndim, const Placements& kinds);

// Says whether dtype, sizes and values are equal (NaN equals NaN).
bool same(const at::Tensor& a, const at::Tensor& b);
// Says whether dtype and sizes are equal, NaN and each infinity stand in the same places, and the finite values of
// floating-point tensors differ by at most `tolerance` of the largest magnitude, or of 1 where that is more. Other
// values must be equal.
bool close(const at::Tensor& a, const at::Tensor& b, double tolerance = 1e-12);

}  // namespace tessera::testing
