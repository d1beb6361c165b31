#include "tessera/tests/dtensor/values.h"

#include <cmath>

#include <ATen/ATen.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera::testing {
namespace {

// Returns what the rank at coordinate `me` of `n` holds of `x` under a pending reduction.
at::Tensor term(const at::Tensor& x, const Reduction& pending, int64_t n, int64_t me) {
  if (x.numel() == 0) return x;
  const std::string& kind = pending.text();
  const bool odd = n % 2 == 0;  // the other ranks have factors of -1
  if (kind == "sum" || kind == "masked sum") return me == 0 ? x - n * (n - 1) / 2 : at::full_like(x, me);
  if (kind == "avg") return ((me == 0 ? x : at::zeros_like(x)) + (2 * me - (n - 1))) * n;
  if (kind == "product") return me == 0 ? (odd ? -x : x) : at::full_like(x, 1).neg();
  const at::Tensor mine = (at::arange(x.numel(), x.device()) % n == me).view(x.sizes());
  if (kind == "bit_and") return at::where(mine, x, x.scalar_type() == at::kBool ? x | true : x | (8 * me));
  if (kind == "bit_or") return at::where(mine, x, me % 2 == 0 ? at::zeros_like(x) : x);
  if (kind == "bit_xor") return at::where(mine, x, at::zeros_like(x));
  // Shares of x^p, with a sign that has no effect.
  if (kind == "norm 1" || kind == "norm 3") {
    const double share = 2.0 * static_cast<double>(me + 1) / static_cast<double>(n * (n + 1));
    return x * (std::pow(share, kind == "norm 1" ? 1.0 : 1.0 / 3) * (me % 2 == 0 ? 1 : -1));
  }
  if (kind == "norm 2") return at::where(mine, me % 2 == 0 ? x : -x, at::zeros_like(x));
  if (kind == "max") return at::where(mine, x, x.min());
  if (kind == "min") return at::where(mine, x, x.max());
  throw std::logic_error("no terms of " + kind);
}

std::vector<int64_t> coordinate(const DeviceMesh& mesh) { return *mesh.coordinate(); }

}  // namespace

DeviceMesh mesh_over(std::vector<int64_t> shape) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < shape.size(); ++i) names.push_back("d" + std::to_string(i));
  return init_device_mesh(device_name(), std::move(shape), names, world());
}

DeviceMesh line() { return mesh_over({world()->size()}); }

std::vector<DeviceMesh> meshes() {
  std::vector<DeviceMesh> out = {line()};
  if (world()->size() == 4) out.push_back(mesh_over({2, 2}));
  return out;
}

at::Tensor whole_numbers(at::IntArrayRef shape, at::ScalarType dtype, int64_t seed) {
  const int64_t count = c10::multiply_integers(shape);
  const int64_t limit = dtype == at::kBool ? 2 : 5;
  return ((at::arange(count) * 7 + at::arange(count).div(3, "floor") + seed) % limit).view(shape).to(device(), dtype);
}

at::Tensor sample(at::IntArrayRef shape, int64_t seed, at::ScalarType dtype) {
  const int64_t count = c10::multiply_integers(shape);
  return at::sin(at::arange(count, at::kDouble) * 1.7 + 0.37 * static_cast<double>(seed) + 0.1)
      .view(shape)
      .to(device(), dtype);
}

at::Tensor spread(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor local = at::empty({0}, whole.options());
  if (mesh.is_member()) local = piece_of(whole, mesh, placements);
  for (std::size_t i = 0; mesh.is_member() && i < placements.size(); ++i) {
    const int64_t n = mesh.size(static_cast<int64_t>(i));
    if (placements[i].is_partial()) local = term(local, placements[i].reduction(), n, coordinate(mesh)[i]);
  }
  FromLocalOptions options;
  options.shape = whole.sizes().vec();
  return from_local(local.clone(at::MemoryFormat::Contiguous), mesh, placements, options);
}

at::Tensor leaf(const at::Tensor& t) { return t.detach().clone().requires_grad_(); }

at::Tensor leaf(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  return spread(whole, mesh, placements).requires_grad_();
}

at::Tensor piece_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor out = whole.detach();
  const Tile tile = local_tile(whole.sizes(), placements, mesh.mesh().shape(), coordinate(mesh));
  for (std::size_t d = 0; d < tile.size(); ++d) {
    std::vector<at::Tensor> parts = {out.narrow(static_cast<int64_t>(d), 0, 0)};
    for (const Interval& part : tile[d]) parts.push_back(out.narrow(static_cast<int64_t>(d), part.begin, part.size()));
    out = at::cat(parts, static_cast<int64_t>(d));
  }
  return out;
}

std::vector<Placements> all_layouts(int64_t mesh_ndim, const Placements& kinds) {
  std::vector<Placements> out = {{}};
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    std::vector<Placements> longer;
    for (const Placements& start : out) {
      for (const Placement& kind : kinds) {
        longer.push_back(start);
        longer.back().push_back(kind);
      }
    }
    out = std::move(longer);
  }
  std::erase_if(out, [](const Placements& p) { return !partials_commute(p); });
  return out;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  return a.eq(b).logical_or(a.isnan().logical_and(b.isnan())).all().item<bool>();
}

bool close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.numel() == 0) return true;
  if (!a.is_floating_point()) return same(a, b);
  const at::Tensor x = a.detach().to(at::kDouble), y = b.detach().to(at::kDouble);
  const at::Tensor finite = x.isfinite().logical_and(y.isfinite()), others = finite.logical_not();
  if (!same(x.masked_fill(finite, 0), y.masked_fill(finite, 0))) return false;
  const double scale = std::max(1.0, y.masked_fill(others, 0).abs().max().item<double>());
  return (x - y).masked_fill(others, 0).abs().max().item<double>() <= tolerance * scale;
}

}  // namespace tessera::testing
