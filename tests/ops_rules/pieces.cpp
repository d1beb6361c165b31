#include "tessera/tests/ops_rules/pieces.h"

#include <ATen/ATen.h>

#include "tessera/placement/layout.h"

namespace tessera::testing {
namespace {

using Pieces = std::vector<at::Tensor>;

at::Tensor noise_like(const at::Tensor& t) {
  if (at::isIntegralType(t.scalar_type(), false)) return at::randint_like(t, 1, 9);
  return at::rand(t.sizes(), t.options()) * 8 + 0.25;
}

// Where each element's own value is; the other terms are beaten by it.
at::Tensor owner_like(const at::Tensor& t, int64_t n) { return at::randint(n, t.sizes(), t.options().dtype(at::kLong)); }

Pieces sum_terms(const at::Tensor& whole, int64_t n) {
  Pieces out;
  at::Tensor rest = whole.clone();
  for (int64_t k = 1; k < n; ++k) {
    out.push_back(noise_like(whole) * (k % 2 == 0 ? -k : k));
    rest -= out.back();
  }
  out.insert(out.begin(), rest);
  return out;
}

Pieces product_terms(const at::Tensor& whole, int64_t n) {
  if (at::isIntegralType(whole.scalar_type(), true)) {
    Pieces out(static_cast<std::size_t>(n), at::ones_like(whole));
    out.back() = whole;
    return out;
  }
  Pieces out;
  at::Tensor rest = whole.clone();
  for (int64_t k = 1; k < n; ++k) {
    out.push_back(noise_like(whole) * (k % 2 == 0 ? -1 : 1));
    rest /= out.back();
  }
  out.insert(out.begin(), rest);
  return out;
}

Pieces extremum_terms(const at::Tensor& whole, int64_t n, int64_t sign) {
  const at::Tensor owner = owner_like(whole, n);
  Pieces out;
  for (int64_t k = 0; k < n; ++k) {
    const at::Tensor beaten =
        whole.scalar_type() == at::kBool ? at::full_like(whole, sign > 0 ? 0 : 1) : whole - noise_like(whole) * sign;
    out.push_back(at::where(owner == k, whole, whole.scalar_type() == at::kBool ? beaten : beaten.to(whole.scalar_type())));
  }
  return out;
}

Pieces xor_terms(const at::Tensor& whole, int64_t n) {
  Pieces out(static_cast<std::size_t>(n), at::zeros_like(whole));
  out.back() = whole;
  return out;
}

Pieces terms(const at::Tensor& whole, ReduceOp op, int64_t n) {
  switch (op) {
    case ReduceOp::kSum: return sum_terms(whole, n);
    case ReduceOp::kAvg: {
      Pieces out = sum_terms(whole, n);
      for (at::Tensor& t : out) t = t * n;
      return out;
    }
    case ReduceOp::kMax: return extremum_terms(whole, n, 1);
    case ReduceOp::kMin: return extremum_terms(whole, n, -1);
    case ReduceOp::kProduct: return product_terms(whole, n);
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr: return Pieces(static_cast<std::size_t>(n), whole);
    case ReduceOp::kBitXor: return xor_terms(whole, n);
  }
  throw std::logic_error("no such reduction");
}

at::Tensor reduce(const Pieces& pieces, ReduceOp op) {
  at::Tensor out = pieces[0];
  for (std::size_t k = 1; k < pieces.size(); ++k) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: out = out + pieces[k]; break;
      case ReduceOp::kMax: out = at::maximum(out, pieces[k]); break;
      case ReduceOp::kMin: out = at::minimum(out, pieces[k]); break;
      case ReduceOp::kProduct: out = out * pieces[k]; break;
      case ReduceOp::kBitAnd: out = at::bitwise_and(out, pieces[k]); break;
      case ReduceOp::kBitOr: out = at::bitwise_or(out, pieces[k]); break;
      case ReduceOp::kBitXor: out = at::bitwise_xor(out, pieces[k]); break;
    }
  }
  return op == ReduceOp::kAvg ? out / static_cast<double>(pieces.size()) : out;
}

Pieces split(const at::Tensor& whole, const Placement& placement, int64_t n) {
  if (placement.is_partial()) return terms(whole, plain_op(placement), n);
  Pieces out;
  const int64_t d = placement.tensor_dim();
  for (int64_t k = 0; k < n; ++k) {
    const Interval range = chunk_range(whole.size(d), n, k);
    out.push_back(whole.narrow(d, range.begin, range.size()).clone());
  }
  return out;
}

}  // namespace

ReduceOp plain_op(const Placement& partial) {
  for (const ReduceOp op : kPlainReductions) {
    if (partial.is_partial(op)) return op;
  }
  throw std::logic_error("not a plain reduction: " + to_string(partial));
}

std::vector<at::Tensor> distribute(const at::Tensor& whole, const Placements& placements,
                                   std::span<const int64_t> mesh_shape) {
  if (mesh_shape.empty()) return {whole.clone()};
  const Placements inner(placements.begin() + 1, placements.end());
  Pieces out;
  if (placements[0].is_replicate()) {  // drawn once, so that replicas agree
    const Pieces once = distribute(whole, inner, mesh_shape.subspan(1));
    for (int64_t k = 0; k < mesh_shape[0]; ++k) {
      for (const at::Tensor& t : once) out.push_back(t.clone());
    }
    return out;
  }
  for (const at::Tensor& piece : split(whole, placements[0], mesh_shape[0])) {
    for (const at::Tensor& t : distribute(piece, inner, mesh_shape.subspan(1))) out.push_back(t);
  }
  return out;
}

at::Tensor join(std::span<const at::Tensor> pieces, const Placements& placements, std::span<const int64_t> mesh_shape,
                bool& consistent) {
  if (mesh_shape.empty()) return pieces[0];
  const Placements inner(placements.begin() + 1, placements.end());
  const std::size_t block = pieces.size() / static_cast<std::size_t>(mesh_shape[0]);
  Pieces parts;
  for (std::size_t k = 0; k < static_cast<std::size_t>(mesh_shape[0]); ++k) {
    parts.push_back(join(pieces.subspan(k * block, block), inner, mesh_shape.subspan(1), consistent));
  }
  if (placements[0].is_shard()) return at::cat(parts, placements[0].tensor_dim());
  if (placements[0].is_partial()) return reduce(parts, plain_op(placements[0]));
  for (const at::Tensor& part : parts) consistent &= same_values(part, parts[0]);
  return parts[0];
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (at::isIntegralType(a.scalar_type(), true)) return at::equal(a, b);
  const double tolerance = a.scalar_type() == at::kFloat ? 1e-4 : 1e-9;
  return at::allclose(a, b, tolerance, tolerance, true);
}

bool can_be_partial(at::ScalarType type, ReduceOp op) {
  const bool picks = op == ReduceOp::kMax || op == ReduceOp::kMin;
  if (is_bitwise(op)) return at::isIntegralType(type, /*includeBool=*/true);
  if (type == at::kBool) return picks;
  if (at::isComplexType(type)) return !picks;
  return at::isFloatingType(type) || op != ReduceOp::kAvg;
}

std::vector<int64_t> coordinate_of(std::size_t rank, std::span<const int64_t> mesh_shape) {
  std::vector<int64_t> out(mesh_shape.size());
  auto rest = static_cast<int64_t>(rank);
  for (std::size_t i = mesh_shape.size(); i-- > 0;) {
    out[i] = rest % mesh_shape[i];
    rest /= mesh_shape[i];
  }
  return out;
}

std::size_t num_ranks(std::span<const int64_t> mesh_shape) {
  std::size_t out = 1;
  for (const int64_t n : mesh_shape) out *= static_cast<std::size_t>(n);
  return out;
}

}  // namespace tessera::testing
