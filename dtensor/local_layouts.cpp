#include "tessera/dtensor/local_layouts.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/failing.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

using detail::LocalLayouts;

std::vector<int64_t> inferred_shape(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  std::vector<int64_t> shape = local.sizes().vec();
  const auto has_size = [](const Placement& p) { return p.is_shard() && !p.is_chunks() && p.partition().size(); };
  if (std::ranges::none_of(placements, has_size)) {
    for (std::size_t i = 0; i < placements.size(); ++i) {
      if (!placements[i].is_shard()) continue;
      shape[static_cast<std::size_t>(placements[i].tensor_dim())] *= mesh.size(static_cast<int64_t>(i));
    }
    return shape;
  }
  // A cut of a fixed size says what the cuts before it leave.
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::vector<Cut> cuts = cuts_of(static_cast<int64_t>(d), placements, mesh.mesh().shape());
    for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) {
      shape[d] = cut->partition->size().value_or(shape[d] * cut->parts);
    }
  }
  return shape;
}

void check_mask(const at::Tensor& local, const Placements& placements, const at::Tensor& mask) {
  if (!mask.defined()) return;
  const bool masked = std::ranges::any_of(
      placements, [](const Placement& p) { return p.is_partial() && p.reduction().unmasked() != nullptr; });
  if (masked && mask.scalar_type() == at::kBool && mask.sizes() == local.sizes() && mask.device() == local.device())
    return;
  throw std::invalid_argument(fmt::format(
      "from_local: a mask of {} [{}] for a piece [{}] as {}; a mask must be bool, of the piece's sizes and device, and "
      "needs a MaskedPartial placement",
      c10::toString(mask.scalar_type()), fmt::join(mask.sizes(), ", "), fmt::join(local.sizes(), ", "),
      to_string(placements)));
}

// Runs a check of what this rank has been given. Other ranks may see nothing wrong in theirs, so an error fails the
// job, unless all ranks compare (FromLocalOptions::check).
template <class Check>
void check_here(const DeviceMesh& mesh, const FromLocalOptions& options, const Check& check) {
  if (options.check) return check();
  failing(mesh.world(), "from_local", check);
}

void check_tensors(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   const at::Tensor& mask) {
  if (!local.defined()) throw std::invalid_argument("from_local: the local tensor is undefined; give a tensor");
  detail::refuse_deferred("from_local", local);
  detail::refuse_deferred("from_local: mask", mask);
  if (detail::is_dtensor(local)) {
    throw std::invalid_argument(
        "from_local: the tensor is a DTensor already; call redistribute to change its placements");
  }
  if (local.layout() != at::kStrided) {
    throw std::invalid_argument(
        fmt::format("from_local: the tensor is of layout {}; give a dense one, to_dense()", c10::str(local.layout())));
  }
  if (local.is_quantized()) {
    throw std::invalid_argument(fmt::format("from_local: the tensor is quantized, {}; dequantize it first",
                                            c10::toString(local.scalar_type())));
  }
  check_device(local, mesh, "from_local", "tensor");
  check_mask(local, placements, mask);
  for (const Placement& p : placements) {
    if (p.is_partial()) p.reduction().check(local.scalar_type(), "from_local");
  }
}

// Checks what every rank passes alike, so that all of them throw.
void check_options(const Placements& placements, const FromLocalOptions& options) {
  if (placements.size() > 1) check_commute(placements, "from_local");
  if (options.stride && !options.shape) {
    throw std::invalid_argument("from_local: stride without shape; give both, or shape alone");
  }
  if (options.stride && options.stride->size() != options.shape->size()) {
    throw std::invalid_argument(fmt::format("from_local: stride [{}] for shape [{}]; give one stride per dimension",
                                            fmt::join(*options.stride, ", "), fmt::join(*options.shape, ", ")));
  }
}

LocalLayouts read_layouts(const at::Tensor& local, const DeviceMesh& mesh, const Placements& given,
                          const FromLocalOptions& options) {
  const auto ndim = options.shape ? static_cast<int64_t>(options.shape->size()) : local.dim();
  const Placements placements = normalize(given, mesh.mesh(), ndim, "from_local");
  const std::vector<int64_t> shape = options.shape ? *options.shape : inferred_shape(local, mesh, placements);
  check_layout(placements, mesh.mesh(), shape, "from_local");
  // The piece's own strides are not used: those of an empty or thin piece determine nothing, and ranks must agree.
  const std::vector<int64_t> strides = options.stride ? *options.stride : contiguous_strides(shape);
  LocalLayouts out{.spec = intern_spec(mesh, placements, shape, strides, local.scalar_type()),
                   .gradient = std::nullopt};
  if (!options.grad_placements) return out;
  const char* const who = "from_local: grad_placements";
  out.gradient = normalize(*options.grad_placements, mesh.mesh(), ndim, who);
  detail::check_gradient_layout(*out.spec, *out.gradient, who);
  return out;
}

}  // namespace

namespace detail {

void check_gradient_layout(const Spec& spec, const Placements& gradient, const char* who) {
  const auto cut_alike = [](const Placement& a, const Placement& b) {
    return a == b || !(a.is_shard() || b.is_shard());
  };
  if (std::ranges::equal(gradient, spec.placements, cut_alike)) return;
  const Mesh& mesh = spec.mesh.mesh();
  check_layout(gradient, mesh, spec.sizes, who);
  for (const int64_t rank : mesh.ranks()) {
    const std::vector<int64_t> coordinate = *mesh.coordinate_of(rank);
    const std::vector<int64_t> piece = local_shape(spec.sizes, spec.placements, mesh.shape(), coordinate);
    const std::vector<int64_t> part = local_shape(spec.sizes, gradient, mesh.shape(), coordinate);
    if (part == piece) continue;
    throw std::invalid_argument(
        fmt::format("{}: rank {} has [{}] of the tensor [{}] as {}, but [{}] of a gradient as {}; give placements by "
                    "which every rank has as much of the gradient as of the tensor",
                    who, rank, fmt::join(piece, ", "), fmt::join(spec.sizes, ", "), to_string(spec.placements),
                    fmt::join(part, ", "), to_string(gradient)));
  }
}

LocalLayouts checked_layouts(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                             const FromLocalOptions& options) {
  check_options(placements, options);
  check_here(mesh, options, [&] { check_tensors(local, mesh, placements, options.mask); });
  // Every rank sees alike what is wrong with a shape that is given, or with a number of placements.
  const auto fits_mesh = [&](const Placements& each) { return std::ssize(each) == mesh.ndim(); };
  const bool alike =
      options.shape || !fits_mesh(placements) || (options.grad_placements && !fits_mesh(*options.grad_placements));
  if (alike || options.check) return read_layouts(local, mesh, placements, options);
  return failing(mesh.world(), "from_local", [&] { return read_layouts(local, mesh, placements, options); });
}

void check_piece(const at::Tensor& local, const Spec& spec) {
  if (!spec.mesh.is_member() || local.sizes() == at::IntArrayRef(spec.local_sizes)) return;
  const std::string text = fmt::format(
      "from_local: this rank's piece is [{}], but [{}] as {} on {} has [{}] here; pass the global shape in "
      "options.shape, or options.check to compare all ranks first",
      fmt::join(local.sizes(), ", "), fmt::join(spec.sizes, ", "), to_string(spec.placements), spec.mesh.to_string(),
      fmt::join(spec.local_sizes, ", "));
  spec.mesh.world().fail("from_local", text);
  throw std::invalid_argument(text);
}

}  // namespace detail
}  // namespace tessera
