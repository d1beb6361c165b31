#include "tessera/tests/custom_placement/placement_checks.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/dtensor/redistribute/pairs.h"
#include "tessera/tests/dtensor/values.h"

namespace tessera::testing {
namespace {

using Sizes = std::vector<int64_t>;

// Returns lists in which `placement` occurs and which can lay out a tensor of `shape`: it alone, and on a mesh of
// several dimensions beside Replicate, a Shard and a Partial, before and after a Shard of the same dimension, and
// everywhere.
std::vector<Placements> lists_with(const Placement& placement, const Sizes& shape, const Sizes& mesh_shape) {
  const Mesh mesh(mesh_shape);
  const auto first = [&](const Placement& ours, const Placement& others) {
    Placements list(mesh_shape.size(), others);
    list.front() = ours;
    return list;
  };
  std::vector<Placements> lists = {Placements(mesh_shape.size(), placement)};
  if (mesh.ndim() > 1) {
    for (const Placement& other : {Replicate(), Shard(0), Shard(1), Partial()})
      lists.push_back(first(placement, other));
    lists.push_back(first(Shard(1), placement));
    if (placement.is_shard()) lists.push_back(first(placement.ordered(1), Shard(0)));
  }
  std::vector<Placements> out;
  for (const Placements& list : lists) {
    const Placements normal = normalize(list, mesh, 2, "check_placement");
    if (partials_commute(normal) && is_layout(normal, mesh, shape)) out.push_back(normal);
  }
  return out;
}

void on_ranks(const Sizes& mesh_shape, const std::function<void(const DeviceMesh& mesh)>& body) {
  run_in_process(Mesh(mesh_shape).size(),
                 [&](const std::shared_ptr<World>& world) { body(init_device_mesh("cpu", mesh_shape, {}, world)); });
}

std::vector<Pair> pairs_with(const Placement& placement, const Sizes& shape, const Sizes& mesh_shape,
                             at::ScalarType dtype) {
  const auto others =
      at::isFloatingType(dtype) ? built_in_layouts(shape, mesh_shape) : integer_layouts(shape, mesh_shape);
  std::vector<Pair> pairs;
  for (const Placements& ours : lists_with(placement, shape, mesh_shape)) {
    for (const Placements& other : others) pairs.push_back({.from = other, .to = ours});
  }
  return pairs;
}

// Returns the sum of weight * value, where this rank's term of the value is `piece`.
at::Tensor weighed(const at::Tensor& piece, const DeviceMesh& mesh, const Placement& placement) {
  const at::Tensor weight = sample(piece.sizes(), 7);
  return (full_tensor(from_local(piece, mesh, {placement})) * weight).sum();
}

// Compares d value / d piece with differences, where all pieces are numbers between 1 and 3.
void check_derivative(const Placement& placement, const DeviceMesh& mesh) {
  constexpr double kStep = 1e-5;
  const at::Tensor piece = sample({2, 2}, mesh.world().rank()) + 2;
  const at::Tensor leaf = piece.clone().requires_grad_(true);
  weighed(leaf, mesh, placement).backward();
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    for (int64_t element = 0; element < piece.numel(); ++element) {
      at::Tensor step = at::zeros_like(piece);
      if (rank == mesh.world().rank()) step.view({-1})[element] = kStep;
      const at::Tensor change = weighed(piece + step, mesh, placement) - weighed(piece - step, mesh, placement);
      const double want = change.item<double>() / (2 * kStep);
      const double got = leaf.grad().view({-1})[element].item<double>();
      if (rank != mesh.world().rank() || std::abs(got - want) <= 1e-6 * std::max(1.0, std::abs(want))) continue;
      throw std::runtime_error(
          fmt::format("the derivative of {}: element {} of a piece on {}, rank {}, has {}, and differences give {}",
                      to_string(placement), element, mesh.to_string(), rank, got, want));
    }
  }
}

}  // namespace

void check_placement(const Placement& placement, const PlacementChecks& checks) {
  const bool cuts = placement.is_shard();
  std::vector<at::ScalarType> dtypes = checks.dtypes;
  if (dtypes.empty()) dtypes = cuts ? std::vector{at::kDouble, at::kLong} : std::vector{at::kDouble};
  for (const Sizes& mesh_shape : checks.meshes) {
    // One shape is enough where layouts are many.
    const bool is_line = mesh_shape.size() == 1;
    const std::vector<Sizes> shapes = is_line ? checks.shapes : std::vector<Sizes>{checks.shapes.front()};
    std::size_t count = 0;
    for (const Sizes& shape : shapes) {
      for (const at::ScalarType dtype : dtypes) {
        const std::vector<Pair> pairs = pairs_with(placement, shape, mesh_shape, dtype);
        count += pairs.size();
        on_ranks(mesh_shape, [&](const DeviceMesh& mesh) {
          const at::Tensor whole = checks.values ? checks.values(shape, dtype) : whole_numbers(shape, dtype);
          for (const Pair& pair : pairs) {
            check_pair(pair, whole, mesh, cuts ? 0 : checks.tolerance);
            if (checks.gradients && cuts && is_line && dtype == at::kDouble) check_gradient(pair, shape, mesh);
          }
        });
      }
    }
    if (count == 0) {
      throw std::invalid_argument(fmt::format("check_placement: {} cannot lay out any of the shapes on a mesh of {}",
                                              to_string(placement), Mesh(mesh_shape).to_string()));
    }
    if (!checks.gradients || cuts || !is_line) continue;
    on_ranks(mesh_shape, [&](const DeviceMesh& mesh) { check_derivative(placement, mesh); });
  }
}

}  // namespace tessera::testing
