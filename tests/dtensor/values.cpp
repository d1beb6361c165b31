#include "tessera/tests/dtensor/values.h"

#include <ATen/ATen.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/layout.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera::testing {
namespace {

// What the rank at coordinate `me` of `n` holds of `x` under Partial(op).
at::Tensor term(const at::Tensor& x, ReduceOp op, int64_t n, int64_t me) {
  if (x.numel() == 0) return x;
  const bool odd = n % 2 == 0;  // factors of -1 elsewhere
  switch (op) {
    case ReduceOp::kSum: return me == 0 ? x - n * (n - 1) / 2 : at::full_like(x, me);
    case ReduceOp::kAvg: return x + (2 * me - (n - 1));
    case ReduceOp::kProduct: return me == 0 ? (odd ? -x : x) : at::full_like(x, 1).neg();
    case ReduceOp::kMax:
    case ReduceOp::kMin: break;
  }
  const at::Tensor mine = (at::arange(x.numel()) % n == me).view(x.sizes());
  const at::Tensor loses = op == ReduceOp::kMax ? x.min() : x.max();
  return at::where(mine, x, loses);
}

std::vector<int64_t> coordinate(const DeviceMesh& mesh) { return *mesh.coordinate(); }

bool commute(const Placements& placements) {
  const Placement* first = nullptr;
  for (const Placement& p : placements) {
    if (!p.is_partial()) continue;
    const auto linear = [](const Placement& q) { return q.is_partial(ReduceOp::kSum) || q.is_partial(ReduceOp::kAvg); };
    if (first != nullptr && p != *first && !(linear(p) && linear(*first))) return false;
    first = &p;
  }
  return true;
}

}  // namespace

DeviceMesh mesh_over(std::vector<int64_t> shape) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < shape.size(); ++i) names.push_back("d" + std::to_string(i));
  return init_device_mesh("cpu", std::move(shape), names, world());
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
  return ((at::arange(count) * 7 + at::arange(count).div(3, "floor") + seed) % limit).view(shape).to(dtype);
}

at::Tensor sample(at::IntArrayRef shape, int64_t seed, at::ScalarType dtype) {
  const int64_t count = c10::multiply_integers(shape);
  return at::sin(at::arange(count, at::kDouble) * 1.7 + 0.37 * static_cast<double>(seed) + 0.1).view(shape).to(dtype);
}

at::Tensor spread(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor local = whole.detach();
  if (!mesh.is_member()) local = at::empty({0}, whole.options());
  for (std::size_t i = 0; mesh.is_member() && i < placements.size(); ++i) {
    const int64_t n = mesh.size(static_cast<int64_t>(i));
    const int64_t me = coordinate(mesh)[i];
    if (placements[i].is_shard()) {
      const Range range = chunk_range(local.size(placements[i].tensor_dim()), n, me);
      local = local.narrow(placements[i].tensor_dim(), range.offset, range.size);
    }
    if (placements[i].is_partial()) local = term(local, placements[i].op(), n, me);
  }
  FromLocalOptions options;
  options.shape = whole.sizes().vec();
  return from_local(local.clone(at::MemoryFormat::Contiguous), mesh, placements, options);
}

at::Tensor piece_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor out = whole;
  const auto box = local_box(whole.sizes(), placements, mesh.mesh().shape(), coordinate(mesh));
  for (std::size_t d = 0; d < box.size(); ++d) out = out.narrow(static_cast<int64_t>(d), box[d].offset, box[d].size);
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
  std::erase_if(out, [](const Placements& p) { return !commute(p); });
  return out;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (!a.is_floating_point()) return at::equal(a, b);
  return at::equal(a.nan_to_num(12345), b.nan_to_num(12345));
}

bool close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.numel() == 0) return true;
  if (!a.is_floating_point()) return at::equal(a, b);
  const at::Tensor x = a.to(at::kDouble).nan_to_num(12345, 12345, -12345);
  const at::Tensor y = b.to(at::kDouble).nan_to_num(12345, 12345, -12345);
  const double scale = std::max(1.0, y.abs().max().item<double>());
  return (x - y).abs().max().item<double>() <= tolerance * scale;
}

}  // namespace tessera::testing
