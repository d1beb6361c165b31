#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Make DTensors: each rank fills its own piece, without communication. `sizes` are global. dtype defaults to LibTorch's
// default dtype, and in `full` of an integer, bool or complex value to the type of the value (int64 for an integer).
// They throw std::invalid_argument on a negative size, on placements that do not fit, and on a Partial, whose terms
// could be filled in many ways.
at::Tensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype = std::nullopt);
// Makes 0, 1, ..., size - 1 (int64 unless dtype is given).
at::Tensor arange(int64_t size, const DeviceMesh& mesh, const Placements& placements,
                  std::optional<at::ScalarType> dtype = std::nullopt);
// Draw as manual_seed (tessera/dtensor/random.h) describes: the same numbers on any mesh and with any sharding.
at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype = std::nullopt);
// Draws integers, low <= x < high (int64 unless dtype is given). Throws std::invalid_argument, too, when low >= high
// and when the dtype does not have all of these integers: a floating one has those up to 2^digits, such as 2^11 for
// float16.
at::Tensor randint(int64_t low, int64_t high, at::IntArrayRef sizes, const DeviceMesh& mesh,
                   const Placements& placements, std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace tessera
