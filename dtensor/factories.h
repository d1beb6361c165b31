#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

// DTensors made in place: each rank fills its own piece, without communication. `sizes` are global. dtype defaults to
// LibTorch's default. Throw std::invalid_argument on a negative size, on placements that do not fit, and on a Partial,
// which has no one way to be filled.
at::Tensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype = std::nullopt);
// 0, 1, ... size-1 (int64 unless dtype says otherwise).
at::Tensor arange(int64_t size, const DeviceMesh& mesh, const Placements& placements,
                  std::optional<at::ScalarType> dtype = std::nullopt);
// Drawn as manual_seed (tessera/dtensor/random.h) says: the same numbers on any mesh, however they are sharded.
at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype = std::nullopt);
at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype = std::nullopt);
// Whole numbers, low <= x < high (int64 unless dtype says otherwise).
at::Tensor randint(int64_t low, int64_t high, at::IntArrayRef sizes, const DeviceMesh& mesh,
                   const Placements& placements, std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace tessera
