#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

// Makes parameters with gradients, plain and on meshes, for tests of what is done with all gradients at once.
namespace tessera::testing {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline DeviceMesh line(int64_t size) { return init_device_mesh(device_name(), {size}, {"tp"}, world()); }

// Returns the mesh {dp, tp}, with two data ranks where the number of ranks is even.
inline DeviceMesh grid() {
  const int64_t size = world()->size(), dp = size % 2 == 0 ? 2 : 1;
  return init_device_mesh(device_name(), {dp, size / dp}, {"dp", "tp"}, world());
}

inline at::Tensor numbers(at::IntArrayRef shape, double seed) {
  return (torch::arange(c10::multiply_integers(shape), on(torch::kDouble)) * 0.7 + seed)
      .sin()
      .mul(seed + 1)
      .view(shape);
}

// Makes a parameter, plain or on a mesh, and its plain twin with the same gradient.
struct Parameters {
  std::vector<at::Tensor> ours, plain;

  void add(const at::Tensor& gradient, const DeviceMesh* mesh = nullptr, const Placements& placements = {},
           const std::optional<Placements>& of_gradient = std::nullopt) {
    plain.push_back(torch::zeros_like(gradient).requires_grad_());
    plain.back().mutable_grad() = gradient.clone();
    at::Tensor mine = torch::zeros_like(gradient);
    at::Tensor grad = gradient.clone();
    if (mesh != nullptr) {
      mine = distribute_tensor(mine, *mesh, placements, kNoSource);
      grad = distribute_tensor(grad, *mesh, of_gradient.value_or(placements), kNoSource);
    }
    ours.push_back(mine.detach().requires_grad_());
    ours.back().mutable_grad() = grad;
  }

  // `least` is the tolerance of gradients in double.
  void check_gradients(double least = 1e-13) const {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      const at::Tensor grad = ours[i].grad();
      const at::Tensor whole = is_dtensor(grad) ? full_tensor(grad) : grad;
      const double tolerance = grad.scalar_type() == at::kDouble  ? least
                               : grad.scalar_type() == at::kFloat ? 1e-6
                                                                  : 1e-2;
      CHECK(torch::allclose(whole, plain[i].grad(), tolerance, tolerance, /*equal_nan=*/true));
    }
  }
};

// Returns the meshes of two stages that share no rank.
inline std::vector<DeviceMesh> stages_apart() {
  const int64_t size = world()->size(), half = size / 2;
  std::vector<int64_t> first, second;
  for (int64_t rank = 0; rank < size; ++rank) (rank < half ? first : second).push_back(rank);
  return {DeviceMesh(world(), device().type(), Mesh({half}, {"tp"}, first)),
          DeviceMesh(world(), device().type(), Mesh({size - half}, {"tp"}, second))};
}

}  // namespace tessera::testing
