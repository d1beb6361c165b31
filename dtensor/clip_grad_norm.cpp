#include "tessera/dtensor/clip_grad_norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>

#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "tessera/dtensor/local_gradients.h"
#include "tessera/dtensor/over_meshes.h"
#include "tessera/mesh/check_state.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/values_on_host.h"
#include "tessera/mesh/world.h"

namespace tessera {
namespace {

constexpr const char* kOp = "clip_grad_norm_";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Splits numbers that are not negative into two rows, whose maximum over ranks is joined to theirs: infinity for NaN,
// and a row that is 1 where there was one. Backends lose NaN in a maximum.
at::Tensor without_nan(const at::Tensor& values) {
  const at::Tensor is_nan = at::isnan(values);
  return at::stack({at::where(is_nan, at::full_like(values, kInfinity), values), is_nan.to(at::kDouble)});
}
at::Tensor with_nan(const at::Tensor& rows) {
  return at::where(rows[1].gt(0), at::full_like(rows[0], std::numeric_limits<double>::quiet_NaN()), rows[0]);
}

at::Tensor reduced(const at::Tensor& values, const DeviceMesh& mesh, int64_t mesh_dim, double norm_type) {
  const at::Tensor here = values.to(mesh.device());
  if (norm_type != kInfinity) return all_reduce(here, mesh, mesh_dim, ReduceOp::kSum);
  return with_nan(all_reduce(without_nan(here), mesh, mesh_dim, ReduceOp::kMax));
}

// Says whether this rank counts the gradient: one rank of those that hold the same elements does, as far as their
// values are added up. Over mesh dimensions that cut nothing all ranks have the same values, and none are added up.
bool counts(const detail::LocalGradient& gradient, const DeviceMesh& mesh, const std::vector<bool>& cut) {
  for (std::size_t dim = 0; dim < cut.size(); ++dim) {
    if (cut[dim] && !gradient.is_cut[dim] && mesh.local_rank(static_cast<int64_t>(dim)) != 0) return false;
  }
  return true;
}

at::Tensor combined(const at::Tensor& values, double norm_type) {
  return norm_type == kInfinity ? values.max() : values.sum();
}

// Returns the norms of a piece's parts, of 4096 elements each. Sums of many more floats lose digits, and a copy of the
// piece in double takes longer than the norms. Halves are computed in float.
void add_norms(const at::Tensor& piece, double norm_type, c10::Device device, std::vector<at::Tensor>& norms) {
  constexpr int64_t kPart = 4096;
  const at::Tensor flat = (piece.is_complex() ? at::abs(piece) : piece).reshape(-1);
  const int64_t whole = flat.numel() / kPart * kPart;
  const std::optional<at::ScalarType> dtype =
      c10::isReducedFloatingType(flat.scalar_type()) ? std::optional(at::kFloat) : std::nullopt;
  const auto add = [&](const at::Tensor& parts) {
    norms.push_back(at::linalg_vector_norm(parts, norm_type, {1}, /*keepdim=*/false, dtype)
                        .to(at::TensorOptions().device(device).dtype(at::kDouble)));
  };
  if (whole > 0) add(flat.narrow(0, 0, whole).view({-1, kPart}));
  if (whole < flat.numel()) add(flat.narrow(0, whole, flat.numel() - whole).unsqueeze(0));
}

// Returns what the gradients that this rank counts give to the norm: the sum of their absolute values' powers, or their
// maximum.
at::Tensor of_pieces(const std::vector<at::Tensor>& pieces, double norm_type, c10::Device device) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& piece : pieces) add_norms(piece, norm_type, device, norms);
  if (norms.empty()) return at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  const at::Tensor all = at::cat(norms);
  return combined(norm_type == kInfinity ? all : all.pow(norm_type), norm_type);
}

c10::Device device_of(const detail::LocalGradients& all) {
  if (!all.meshes.empty()) return all.meshes.front().device();
  return all.gradients.empty() ? c10::Device(c10::kCPU) : all.gradients.front().piece.device();
}

// Returns what each mesh's gradients give here, and last what the plain ones give.
at::Tensor local_values(const detail::LocalGradients& all, double norm_type) {
  std::vector<std::vector<at::Tensor>> pieces(all.meshes.size() + 1);
  for (const detail::LocalGradient& each : all.gradients) {
    if (!each.mesh) {
      pieces.back().push_back(each.piece);
    } else if (counts(each, all.meshes[*each.mesh], all.cut[*each.mesh])) {
      pieces[*each.mesh].push_back(each.piece);
    }
  }
  std::vector<at::Tensor> values;
  values.reserve(pieces.size());
  for (const std::vector<at::Tensor>& each : pieces) values.push_back(of_pieces(each, norm_type, device_of(all)));
  return at::stack(values);
}

using Ranks = std::vector<int64_t>;

// Lists, for a mesh that contains this rank, the ranks along its mesh dimensions of `cut`.
std::set<Ranks> groups_of(const DeviceMesh& mesh, const std::vector<bool>& cut) {
  std::set<Ranks> groups;
  for (std::size_t dim = 0; dim < cut.size(); ++dim) {
    const auto mesh_dim = static_cast<int64_t>(dim);
    if (cut[dim] && mesh.size(mesh_dim) > 1) groups.insert(mesh.group_ranks(mesh_dim));
  }
  return groups;
}

// Adds up each mesh's value over its ranks. Values of meshes that have the same ranks along a mesh dimension go
// together.
at::Tensor over_each_mesh(at::Tensor values, const std::vector<DeviceMesh>& meshes,
                          const std::vector<std::vector<bool>>& cut, double norm_type) {
  std::vector<std::set<Ranks>> groups;
  for (std::size_t i = 0; i < meshes.size(); ++i) {
    groups.push_back(meshes[i].is_member() ? groups_of(meshes[i], cut[i]) : std::set<Ranks>());
  }
  std::set<Ranks> done;
  for (std::size_t i = 0; i < meshes.size(); ++i) {
    for (int64_t dim = 0; dim < meshes[i].ndim(); ++dim) {
      if (!meshes[i].is_member() || !cut[i][static_cast<std::size_t>(dim)]) continue;
      const Ranks& ranks = meshes[i].group_ranks(dim);
      if (ranks.size() == 1 || !done.insert(ranks).second) continue;
      std::vector<int64_t> together;
      for (std::size_t j = 0; j < meshes.size(); ++j) {
        if (groups[j].contains(ranks)) together.push_back(static_cast<int64_t>(j));
      }
      // A list of indices would be copied from the host's memory, for which a GPU's stream waits.
      std::vector<at::Tensor> rows;
      rows.reserve(together.size());
      for (const int64_t row : together) rows.push_back(values.select(0, row));
      const at::Tensor sums = reduced(at::stack(rows), meshes[i], dim, norm_type).to(values.device());
      for (std::size_t k = 0; k < rows.size(); ++k) rows[k].copy_(sums[static_cast<int64_t>(k)]);
    }
  }
  return values;
}

bool have_the_same_ranks(const std::vector<DeviceMesh>& meshes) {
  const auto ranks_of = [](const DeviceMesh& mesh) {
    return std::set<int64_t>(mesh.mesh().ranks().begin(), mesh.mesh().ranks().end());
  };
  return std::ranges::all_of(meshes,
                             [&](const DeviceMesh& mesh) { return ranks_of(mesh) == ranks_of(meshes.front()); });
}

// Gives ranks outside a mesh its value, and ranks of different slices the same one.
at::Tensor shared_values(at::Tensor values, const std::vector<DeviceMesh>& meshes) {
  if (meshes.empty() || have_the_same_ranks(meshes)) return values;
  const auto count = static_cast<int64_t>(meshes.size());
  const at::Tensor shared = with_nan(max_over_meshes(without_nan(values.narrow(0, 0, count)), meshes, kOp));
  values.narrow(0, 0, count).copy_(shared);
  return values;
}

// Returns the norm as a number of float64 on the device of the gradients.
at::Tensor norm_of(const detail::LocalGradients& all, double norm_type, const std::optional<DeviceMesh>& stages) {
  const at::Tensor values = over_each_mesh(local_values(all, norm_type), all.meshes, all.cut, norm_type);
  at::Tensor total = combined(shared_values(values, all.meshes), norm_type);
  for (int64_t dim = 0; stages && dim < stages->ndim(); ++dim) total = reduced(total, *stages, dim, norm_type);
  return norm_type == kInfinity ? total : total.pow(1 / norm_type);
}

void check_arguments(double max_norm, double norm_type, const std::optional<DeviceMesh>& stages) {
  if (!(max_norm >= 0)) {
    throw std::invalid_argument(fmt::format("{}: max_norm is {}; it must be 0 or more", kOp, max_norm));
  }
  if (!(norm_type > 0)) {
    throw std::invalid_argument(
        fmt::format("{}: norm_type is {}; it must be positive, or infinity for the largest value", kOp, norm_type));
  }
  if (stages && !stages->is_member()) {
    throw std::invalid_argument(fmt::format("{}: this rank is outside the stages {}; pass the slice that contains it",
                                            kOp, stages->to_string()));
  }
}

void scale(const detail::LocalGradients& all, double factor) {
  std::vector<at::Tensor> pieces;
  for (const detail::LocalGradient& each : all.gradients) {
    // On the CPU LibTorch's operators with a Scalar round it to the pieces' 16 bits, a small one to 0; those with a
    // number that is a tensor do not.
    if (each.piece.is_cpu() && at::isReducedFloatingType(each.piece.scalar_type())) {
      each.piece.mul_(at::native::wrapped_scalar_tensor(factor));
    } else {
      pieces.push_back(each.piece);
    }
  }
  if (!pieces.empty()) at::_foreach_mul_(pieces, factor);
}

// Returns the gradients of this rank's stage.
detail::LocalGradients gradients_of(const std::vector<at::Tensor>& parameters,
                                    const std::optional<DeviceMesh>& stages) {
  return detail::on_own_stage(stages, kOp, [&] { return detail::local_gradients(parameters, kOp); });
}

// Runs `body`, whose collectives are charged to clip_grad_norm_.
template <class Body>
auto in_scope(const detail::LocalGradients& all, const std::optional<DeviceMesh>& stages, double norm_type,
              const Body& body) {
  std::optional<World::Scope> scope;
  std::optional<CheckedStep> step;
  if (World* const world = all.world(stages)) {
    scope.emplace(*world, kOp);
    if (Checked::enabled(*world)) step.emplace(world->check_state(), fmt::format("norm of order {}", norm_type));
  }
  return body();
}

// Returns the norm's value, which may be that of collectives.
double host_number(const at::Tensor& norm, const detail::LocalGradients& all, const std::optional<DeviceMesh>& stages) {
  const World* const world = all.world(stages);
  return (world == nullptr ? norm : values_on_host(norm, *world)).item<double>();
}

}  // namespace

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite, const std::optional<DeviceMesh>& stages) {
  check_arguments(max_norm, norm_type, stages);
  const at::NoGradGuard no_grad;
  const detail::NotDeferred own_tensors;
  const detail::LocalGradients all = gradients_of(parameters, stages);
  const double norm =
      in_scope(all, stages, norm_type, [&] { return host_number(norm_of(all, norm_type, stages), all, stages); });
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw std::runtime_error(fmt::format(
        "{}: the norm of order {} of all gradients is {}; without error_if_nonfinite they are scaled nevertheless", kOp,
        norm_type, norm));
  }
  const double factor = max_norm / (norm + 1e-6);  // 1e-6 as in LibTorch
  if (!(factor >= 1)) scale(all, factor);          // a factor of NaN scales
  return norm;
}

at::Tensor clip_grad_norm_on_device_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                                     const std::optional<DeviceMesh>& stages) {
  check_arguments(max_norm, norm_type, stages);
  const at::NoGradGuard no_grad;
  const detail::NotDeferred own_tensors;
  const detail::LocalGradients all = gradients_of(parameters, stages);
  at::Tensor norm = in_scope(all, stages, norm_type, [&] { return norm_of(all, norm_type, stages); });
  const at::Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1);
  // With a factor of their own device and dtype, a call for pieces that are alike is one kernel or a few.
  for (const std::vector<at::Tensor>& pieces : detail::alike(all.gradients)) {
    const at::ScalarType type = pieces[0].scalar_type();
    if (at::isReducedFloatingType(type)) {  // in 16 bits the factor itself would be rounded, a small one to 0
      const at::Tensor wide = factor.to(pieces[0].device(), at::kFloat);
      for (const at::Tensor& piece : pieces) piece.copy_(piece.to(at::kFloat).mul_(wide));
    } else {
      at::_foreach_mul_(pieces, factor.to(pieces[0].device(), c10::toRealValueType(type)));
    }
  }
  return norm;
}

double clip_grad_norm_(const at::Tensor& parameter, double max_norm, double norm_type, bool error_if_nonfinite,
                       const std::optional<DeviceMesh>& stages) {
  return clip_grad_norm_(std::vector<at::Tensor>{parameter}, max_norm, norm_type, error_if_nonfinite, stages);
}

}  // namespace tessera
