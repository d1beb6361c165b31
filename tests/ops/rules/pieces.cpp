#include "tessera/tests/ops/rules/pieces.h"

#include <ATen/ATen.h>

#include "tessera/placement/layout.h"
#include "tessera/placement/reduction.h"

namespace tessera::testing {
namespace {

using Pieces = std::vector<at::Tensor>;

at::Tensor noise_like(const at::Tensor& t) {
  if (at::isIntegralType(t.scalar_type(), false)) return at::randint_like(t, 1, 9);
  const at::Tensor noise = at::rand(t.sizes(), t.options()) * 8 + 0.25;
  if (t.is_complex()) return noise;
  return at::where(at::rand(t.sizes(), t.options().dtype(at::kFloat)) < 0.5, noise,
                   noise.ceil());  // terms may be zero
}

// Chooses the rank that holds each element's own value; the other terms lose to it.
at::Tensor owner_like(const at::Tensor& t, int64_t n) {
  return at::randint(n, t.sizes(), t.options().dtype(at::kLong));
}

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

// Returns a term that is not the greatest (sign 1) or the least (sign -1).
at::Tensor beaten_by(const at::Tensor& whole, int64_t sign) {
  if (whole.scalar_type() != at::kBool) return (whole - noise_like(whole) * sign).to(whole.scalar_type());
  const at::Tensor any = at::rand(whole.sizes(), whole.options().dtype(at::kFloat)) < 0.5;
  return sign > 0 ? whole.logical_and(any) : whole.logical_or(any);
}

Pieces extremum_terms(const at::Tensor& whole, int64_t n, int64_t sign) {
  const at::Tensor owner = owner_like(whole, n);
  Pieces out;
  for (int64_t k = 0; k < n; ++k) out.push_back(at::where(owner == k, whole, beaten_by(whole, sign)));
  return out;
}

// One rank holds each element's own value. The others hold more bits, which `and` clears, or fewer, which `or` sets.
Pieces bit_terms(const at::Tensor& whole, int64_t n, ReduceOp op) {
  const at::Tensor index = at::arange(whole.numel(), whole.options().dtype(at::kLong)).view(whole.sizes());
  const int64_t limit = whole.scalar_type() == at::kBool ? 2 : 128;
  Pieces out;
  for (int64_t k = 0; k < n; ++k) {
    const at::Tensor bits = at::remainder(index * 37 + (11 * k + 5), limit).to(whole.scalar_type());
    const at::Tensor other = op == ReduceOp::kBitAnd ? at::bitwise_or(whole, bits) : at::bitwise_and(whole, bits);
    out.push_back(at::where(at::remainder(index, n) == k, whole, other));
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
    case ReduceOp::kBitOr: return bit_terms(whole, n, op);
    case ReduceOp::kBitXor: return xor_terms(whole, n);
  }
  throw std::logic_error("no such reduction");
}

// Returns pieces of `n` ranks of which `whole` is the value: of a user's reduction those that its spread() makes.
Pieces terms_of(const at::Tensor& whole, const Placement& partial, int64_t n) {
  if (const auto op = plain_op(partial)) return terms(whole, *op, n);
  Pieces out;
  for (int64_t i = 0; i < n; ++i) out.push_back(partial.reduction().spread(whole, i, n).to(whole.scalar_type()));
  return out;
}

at::Tensor value_of(const Pieces& pieces, const Placement& partial) {
  if (const auto op = plain_op(partial)) return reduced(pieces, *op);
  const Reduction& reduction = partial.reduction();
  Pieces each;
  for (const at::Tensor& piece : pieces) each.push_back(term_of(reduction, piece));
  return value_of_terms(reduction, reduced(each, reduction.op()), std::ssize(pieces)).to(pieces[0].scalar_type());
}

// Makes terms, copies and, along dimensions that cut, the whole.
Pieces uncut(const at::Tensor& whole, std::span<const Placement> placements, std::span<const int64_t> mesh_shape) {
  if (mesh_shape.empty()) return {whole};
  const int64_t n = mesh_shape[0];
  Pieces out;
  if (placements[0].is_partial()) {
    for (const at::Tensor& term : terms_of(whole, placements[0], n)) {
      for (const at::Tensor& t : uncut(term, placements.subspan(1), mesh_shape.subspan(1))) out.push_back(t);
    }
    return out;
  }
  const Pieces once = uncut(whole, placements.subspan(1), mesh_shape.subspan(1));  // drawn once, so that replicas agree
  for (int64_t k = 0; k < n; ++k) out.insert(out.end(), once.begin(), once.end());
  return out;
}

// Holds a tensor that is zero outside a part, and says which elements the part has.
struct Part {
  at::Tensor values;
  at::Tensor here;
};

Part joined(std::span<const Part> parts, std::span<const Placement> placements, std::span<const int64_t> mesh_shape,
            bool& consistent) {
  if (mesh_shape.empty()) return parts[0];
  const std::size_t block = parts.size() / static_cast<std::size_t>(mesh_shape[0]);
  std::vector<Part> each;
  for (std::size_t k = 0; k < static_cast<std::size_t>(mesh_shape[0]); ++k) {
    each.push_back(joined(parts.subspan(k * block, block), placements.subspan(1), mesh_shape.subspan(1), consistent));
  }
  if (placements[0].is_partial()) {
    Pieces values;
    for (const Part& part : each) values.push_back(part.values);
    return {.values = value_of(values, placements[0]), .here = each[0].here};
  }
  Part out = each[0];
  for (const Part& part : each) {
    if (placements[0].is_replicate()) consistent &= same_values(part.values, out.values);
    out.values = at::where(part.here, part.values, out.values);
    out.here = out.here.logical_or(part.here);
  }
  return out;
}

// Says whether values differ by at most 8 times the dtype's epsilon, as a part of the largest finite magnitude of `b`.
bool close_in_16_bits(const at::Tensor& a, const at::Tensor& b) {
  if (b.numel() == 0) return true;
  const at::Tensor x = a.to(at::kFloat), y = b.to(at::kFloat);
  const double epsilon = a.scalar_type() == at::kHalf ? 0x1p-10 : 0x1p-7;
  const auto largest = y.nan_to_num(0.0, 0.0, 0.0).abs().max().item<double>();
  return at::allclose(x, y, 0, 8 * epsilon * largest, /*equal_nan=*/true);
}

}  // namespace

std::optional<ReduceOp> plain_op(const Placement& partial) {
  for (const ReduceOp op : kPlainReductions) {
    if (partial.is_partial(op)) return op;
  }
  return std::nullopt;
}

at::Tensor reduced(const std::vector<at::Tensor>& terms, ReduceOp op) {
  at::Tensor out = terms[0];
  for (std::size_t k = 1; k < terms.size(); ++k) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: out = out + terms[k]; break;
      case ReduceOp::kMax: out = at::maximum(out, terms[k]); break;
      case ReduceOp::kMin: out = at::minimum(out, terms[k]); break;
      case ReduceOp::kProduct: out = out * terms[k]; break;
      case ReduceOp::kBitAnd: out = at::bitwise_and(out, terms[k]); break;
      case ReduceOp::kBitOr: out = at::bitwise_or(out, terms[k]); break;
      case ReduceOp::kBitXor: out = at::bitwise_xor(out, terms[k]); break;
    }
  }
  return op == ReduceOp::kAvg ? out / static_cast<double>(terms.size()) : out;
}

at::Tensor cut(at::Tensor whole, const Tile& tile) {
  for (std::size_t d = 0; d < tile.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    Pieces parts = {whole.narrow(dim, 0, 0)};
    for (const Interval& i : tile[d]) parts.push_back(whole.narrow(dim, i.begin, i.size()));
    whole = at::cat(parts, dim);
  }
  return whole.clone();
}

std::vector<at::Tensor> distribute(const at::Tensor& whole, const Placements& placements,
                                   std::span<const int64_t> mesh_shape) {
  Pieces out = uncut(whole, placements, mesh_shape);
  for (std::size_t r = 0; r < out.size(); ++r) {
    out[r] = cut(out[r], local_tile(whole.sizes(), placements, mesh_shape, coordinate_of(r, mesh_shape)));
  }
  return out;
}

at::Tensor embedded(const at::Tensor& piece, const Tile& tile, at::IntArrayRef sizes) {
  const at::Tensor out = at::zeros(sizes, piece.options());
  std::vector<std::optional<at::Tensor>> places;
  for (std::size_t d = 0; d < tile.size(); ++d) {
    Pieces held = {at::empty({0}, at::kLong)};
    for (const Interval& i : tile[d]) held.push_back(at::arange(i.begin, i.end, at::kLong));
    std::vector<int64_t> shape(tile.size(), 1);
    shape[d] = -1;
    places.emplace_back(at::cat(held).view(shape));
  }
  if (piece.numel() == 0) return out;
  return tile.empty() ? piece.clone() : out.index_put_(c10::List<std::optional<at::Tensor>>(places), piece);
}

at::Tensor join(std::span<const at::Tensor> pieces, const Placements& placements, std::span<const int64_t> mesh_shape,
                at::IntArrayRef sizes, bool& consistent) {
  std::vector<Part> parts;
  for (std::size_t r = 0; r < pieces.size(); ++r) {
    const Tile tile = local_tile(sizes, placements, mesh_shape, coordinate_of(r, mesh_shape));
    parts.push_back({.values = embedded(pieces[r], tile, sizes),
                     .here = embedded(at::ones(pieces[r].sizes(), at::kBool), tile, sizes)});
  }
  return joined(parts, placements, mesh_shape, consistent).values;
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (at::isIntegralType(a.scalar_type(), true)) return at::equal(a, b);
  if (a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16) return close_in_16_bits(a, b);
  const double tolerance = a.scalar_type() == at::kFloat ? 1e-4 : 1e-9;
  return at::allclose(a, b, tolerance, tolerance, true);
}

bool can_be_partial(at::ScalarType type, ReduceOp op) {
  if (at::isFloat8Type(type) || at::isBarebonesUnsignedType(type)) return false;  // LibTorch cannot add these dtypes
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
