#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// Tensors that every rank of a test makes alike, and DTensors of them with different terms on every rank.
namespace tessera::testing {

// All ranks of this test's world as a mesh of that shape, its dimensions called d0, d1, ...; line() is of one
// dimension.
DeviceMesh mesh_over(std::vector<int64_t> shape);
DeviceMesh line();
// line(), and on four ranks {2, 2} too.
std::vector<DeviceMesh> meshes();

// Small whole numbers from 0 to 4, exact in every dtype.
at::Tensor whole_numbers(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble, int64_t seed = 0);
// Numbers in [-1, 1], no two alike.
at::Tensor sample(at::IntArrayRef shape, int64_t seed = 0, at::ScalarType dtype = at::kDouble);

// The DTensor of value `whole`, made without communication. Ranks hold different terms where it is Partial.
at::Tensor spread(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);
// This rank's piece of `whole`; Partial counts as whole.
at::Tensor piece_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);

// Every list of one of `kinds` a mesh dimension, but for those with reductions pending that do not commute.
std::vector<Placements> all_layouts(int64_t mesh_ndim, const Placements& kinds);

// Alike in dtype, sizes and bits (NaN equals NaN).
bool same(const at::Tensor& a, const at::Tensor& b);
// Alike in dtype and sizes, values apart by at most `tolerance` of the largest magnitude.
bool close(const at::Tensor& a, const at::Tensor& b, double tolerance = 1e-12);

}  // namespace tessera::testing
