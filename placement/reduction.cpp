#include "tessera/placement/reduction.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <stdexcept>

#include <ATen/ops/abs.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

// Returns the largest number of a floating dtype, which is infinity where it has one.
double largest(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat8_e4m3fn: return std::numeric_limits<c10::Float8_e4m3fn>::max();
    case at::kFloat8_e4m3fnuz: return std::numeric_limits<c10::Float8_e4m3fnuz>::max();
    case at::kFloat8_e5m2fnuz: return std::numeric_limits<c10::Float8_e5m2fnuz>::max();
    default: return std::numeric_limits<double>::infinity();
  }
}

c10::Scalar extreme(at::ScalarType dtype, bool highest) {
  if (c10::isFloatingType(dtype)) return highest ? largest(dtype) : -largest(dtype);
  if (dtype == at::kBool) return highest;
  const int shift = std::max(0, 64 - static_cast<int>(c10::elementSize(dtype)) * 8);
  if (c10::isSignedType(dtype)) {
    return (highest ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min()) >> shift;
  }
  return highest ? c10::Scalar(std::numeric_limits<uint64_t>::max() >> shift) : c10::Scalar(0);
}

// Says whether integral dtype `a` has every number of integral dtype `b`.
bool holds_all(at::ScalarType a, at::ScalarType b) {
  if (c10::isSignedType(a) == c10::isSignedType(b)) return c10::elementSize(a) >= c10::elementSize(b);
  return c10::isSignedType(a) && c10::elementSize(a) > c10::elementSize(b);
}

// Says whether it is LibTorch's own reduction of its op, perhaps masked.
bool is_plain(const Reduction& reduction) {
  const ReductionPtr inner = reduction.unmasked();
  return (inner ? inner.get() : &reduction) == plain_reduction(reduction.op()).get();
}

// Says whether a sum of a few numbers of this dtype may overflow although their mean does not.
bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || c10::isFloat8Type(dtype); }

// Checks what `method` of a reduction has made of `given`.
void check_sizes(const at::Tensor& made, const at::Tensor& given, const Reduction& reduction, const char* method) {
  if (!made.defined()) {
    throw std::invalid_argument(fmt::format(
        "redistribute: Reduction::{} of P({}) has returned an undefined tensor; return one of the sizes [{}]", method,
        reduction.text(), fmt::join(given.sizes(), ", ")));
  }
  if (made.sizes() == given.sizes()) return;
  throw std::invalid_argument(
      fmt::format("redistribute: Reduction::{} of P({}) has made a tensor [{}] of one [{}]; compute it element by "
                  "element, so that the sizes stay",
                  method, reduction.text(), fmt::join(made.sizes(), ", "), fmt::join(given.sizes(), ", ")));
}

class Plain : public Reduction {
 public:
  explicit Plain(ReduceOp op)
      : Reduction(std::string(to_string(op)), op == ReduceOp::kAvg ? ReduceOp::kSum : op), named_(op) {}

  at::Tensor to_term(const at::Tensor& piece) const override {
    return named_ == ReduceOp::kAvg && is_narrow(piece.scalar_type()) ? piece.to(at::kFloat) : piece;
  }
  at::Tensor from_terms(const at::Tensor& terms, int64_t ranks) const override {
    return named_ == ReduceOp::kAvg && ranks > 1 ? divided_by_count(terms, ranks) : terms;
  }
  at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const override {
    return named_ == ReduceOp::kAvg ? value : Reduction::spread(value, coordinate, ranks);
  }
  at::Tensor only_piece(const at::Tensor& value, int64_t ranks) const override {
    return named_ == ReduceOp::kAvg ? value.mul(ranks) : value;
  }
  std::optional<double> slope(int64_t ranks) const override {
    if (named_ == ReduceOp::kSum) return 1;
    if (named_ == ReduceOp::kAvg) return 1.0 / static_cast<double>(ranks);
    return std::nullopt;
  }
  at::Tensor derivative(const at::Tensor& piece, const Peers& peers) const override {
    switch (named_) {
      case ReduceOp::kMax:
      case ReduceOp::kMin: {
        // The elements that are the extremum share the gradient, as in amax.
        const at::Tensor hits = at::eq(piece, peers.all_reduce(piece, named_)).to(piece.scalar_type());
        return hits.div(peers.all_reduce(hits, ReduceOp::kSum));
      }
      case ReduceOp::kProduct: {
        // The derivative is the product of the other pieces, computed without a division by zero.
        const at::Tensor zero = at::eq(piece, 0);
        const at::Tensor mine = zero.to(piece.scalar_type());
        const at::Tensor others_zero = peers.all_reduce(mine, ReduceOp::kSum).sub(mine);
        const at::Tensor factor = at::where(zero, at::ones_like(piece), piece);
        const at::Tensor rest = peers.all_reduce(factor, ReduceOp::kProduct).div(factor);
        // Autograd multiplies gradients by the conjugate of a derivative. For real numbers this makes no copy.
        return at::where(at::eq(others_zero, 0), rest, at::zeros_like(rest)).conj().resolve_conj();
      }
      default: return Reduction::derivative(piece, peers);
    }
  }
  void check(at::ScalarType dtype, const std::string& who) const override { check_reduces(named_, dtype, who); }

 private:
  const ReduceOp named_;
};

class Norm final : public Reduction {
 public:
  explicit Norm(double p) : Reduction(fmt::format("norm {}", p), ReduceOp::kSum), p_(p) {
    if (!std::isfinite(p) || p == 0) {
      throw std::invalid_argument(fmt::format(
          "NormPartial: a norm of order {}; give a finite order other than 0 (of infinity, Partial(max) of the "
          "absolute values is the same; of 0, Partial(sum) of what is not zero)",
          p));
    }
  }
  at::Tensor to_term(const at::Tensor& piece) const override {
    return at::pow(at::abs(at::elementSize(piece.scalar_type()) < 4 ? piece.to(at::kFloat) : piece), p_);
  }
  at::Tensor from_terms(const at::Tensor& terms, int64_t) const override { return at::pow(terms, 1 / p_); }
  at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const override {
    return Reduction::spread(only_piece(value, ranks), coordinate, ranks);
  }
  at::Tensor only_piece(const at::Tensor& value, int64_t) const override {
    if (is_queued(value)) {
      check_on_device(at::lt(value, 0).logical_not(),
                      "redistribute: a value with negative elements cannot be a pending norm");
      return value;
    }
    if (!at::lt(value, 0).any().item<bool>()) return value;
    throw std::runtime_error(
        fmt::format("redistribute: a value with negative elements cannot be P({}), which is never negative", text()));
  }
  c10::Scalar neutral(at::ScalarType) const override { return p_ > 0 ? 0 : std::numeric_limits<double>::infinity(); }
  at::Tensor derivative(const at::Tensor& piece, const Peers& peers) const override {
    const at::Tensor value = from_terms(peers.all_reduce(to_term(piece), ReduceOp::kSum), 0);
    const at::Tensor ratio = at::pow(at::abs(piece).div(value), p_ - 1).mul(at::sign(piece));
    return at::where(at::eq(piece, 0), at::zeros_like(ratio), ratio).to(piece.scalar_type());  // 0 at 0, as in at::norm
  }
  void check(at::ScalarType dtype, const std::string& who) const override {
    if (c10::isFloatingType(dtype)) return;
    throw std::invalid_argument(
        fmt::format("{}: P({}) of {} is not defined; convert to a floating dtype", who, text(), c10::toString(dtype)));
  }

 private:
  const double p_;
};

class Masked final : public Reduction {
 public:
  explicit Masked(ReduceOp op)
      : Reduction(fmt::format("masked {}", to_string(op)), plain_reduction(op)->op()), of_(plain_reduction(op)) {}

  at::Tensor to_term(const at::Tensor& piece) const override { return of_->to_term(piece); }
  at::Tensor from_terms(const at::Tensor& terms, int64_t ranks) const override { return of_->from_terms(terms, ranks); }
  at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const override {
    return of_->spread(value, coordinate, ranks);
  }
  at::Tensor only_piece(const at::Tensor& value, int64_t ranks) const override { return of_->only_piece(value, ranks); }
  std::optional<double> slope(int64_t ranks) const override { return of_->slope(ranks); }
  at::Tensor derivative(const at::Tensor& piece, const Peers& peers) const override {
    return of_->derivative(piece, peers);
  }
  void check(at::ScalarType dtype, const std::string& who) const override { of_->check(dtype, who); }
  ReductionPtr unmasked() const override { return of_; }

 private:
  const ReductionPtr of_;
};

// Returns three small numbers, which most reductions can have as a value: positive ones, or complex ones whose parts
// are both positive.
at::Tensor probe_of(at::ScalarType dtype) {
  if (c10::isIntegralType(dtype, /*includeBool=*/true)) return at::arange(1, 4).to(dtype);
  const at::Tensor reals = at::arange(1, 4, at::kDouble).div(4);
  return c10::isComplexType(dtype) ? at::complex(reals, reals.add(0.5)).to(dtype) : reals.to(dtype);
}

// Throws std::invalid_argument where the reduction's neutral element is no number of the dtype.
void check_neutral(const Reduction& reduction, at::ScalarType dtype, const std::string& who) {
  const c10::Scalar neutral = reduction.neutral(dtype);
  try {
    at::full({2}, neutral, dtype);  // LibTorch does not check a single one
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (const std::exception&) {
    throw std::invalid_argument(fmt::format(
        "{}: Reduction::neutral of P({}) is {}, which no tensor of {} can hold; refuse this dtype in Reduction::check, "
        "or implement neutral for it",
        who, reduction.text(), neutral.isComplex() ? "complex" : fmt::format("{}", neutral.toDouble()),
        c10::toString(dtype)));
  }
}

// Says whether two tensors of one dtype are equal but for the rounding of a few operations.
bool is_close(const at::Tensor& got, const at::Tensor& want) {
  if (got.sizes() != want.sizes()) return false;
  const at::ScalarType dtype = want.scalar_type();
  if (dtype == at::kHalf) return at::allclose(got.to(at::kFloat), want.to(at::kFloat), /*rtol=*/2e-2);
  if (dtype == at::kBFloat16) return at::allclose(got.to(at::kFloat), want.to(at::kFloat), /*rtol=*/0.15);
  return at::allclose(got, want, /*rtol=*/1e-3);
}

// Returns the value of these pieces, in their dtype.
at::Tensor value_of(const Reduction& reduction, const std::vector<at::Tensor>& pieces) {
  std::vector<at::Tensor> terms;
  terms.reserve(pieces.size());
  for (const at::Tensor& piece : pieces) terms.push_back(term_of(reduction, piece));
  const ReduceOp op = reduction.op();
  const at::ScalarType dtype = terms[0].scalar_type();
  const at::Tensor reduced =
      from_reducible(reduce_rows(to_reducible(at::stack(terms), op, "redistribute"), op), dtype, op);
  return value_of_terms(reduction, reduced, std::ssize(pieces)).to(pieces[0].scalar_type());
}

// Returns the piece of each of `ranks` ranks that redistribute makes of a value that all of them hold.
std::vector<at::Tensor> spread_over(const Reduction& reduction, const at::Tensor& value, int64_t ranks) {
  std::vector<at::Tensor> pieces;
  pieces.reserve(static_cast<std::size_t>(ranks));
  for (int64_t i = 0; i < ranks; ++i) {
    const at::Tensor piece = reduction.spread(value, i, ranks);
    check_sizes(piece, value, reduction, "spread");
    pieces.push_back(piece.to(value.scalar_type()));
  }
  return pieces;
}

// Says whether these are the pieces that the default of spread() makes.
bool are_default(const std::vector<at::Tensor>& pieces, const Reduction& reduction, const at::Tensor& value) {
  const std::ptrdiff_t ranks = std::ssize(pieces);
  for (std::ptrdiff_t i = 0; i < ranks; ++i) {
    const at::Tensor piece = reduction.Reduction::spread(value, i, ranks);
    if (!at::equal(pieces[static_cast<std::size_t>(i)], piece)) return false;
  }
  return true;
}

// Returns the methods that do not fit to make pieces of `value` over `ranks` ranks, or nullptr.
const char* wrong_method(const Reduction& reduction, const at::Tensor& value, int64_t ranks) {
  const at::ScalarType dtype = value.scalar_type();
  const std::vector<at::Tensor> pieces = spread_over(reduction, value, ranks);
  if (!is_close(value_of(reduction, pieces), value)) {
    return are_default(pieces, reduction, value) ? "spread, or Reduction::neutral" : "spread";
  }
  std::vector<at::Tensor> alone(static_cast<std::size_t>(ranks), at::full_like(value, reduction.neutral(dtype)));
  alone[0] = reduction.only_piece(value, ranks).to(dtype);
  return is_close(value_of(reduction, alone), value) ? nullptr : "only_piece and Reduction::neutral";
}

// Says whether the pieces of a value over 2 x 2 ranks have it as their value at once, and one mesh dimension after the
// other.
bool nests(const Reduction& reduction, const at::Tensor& value) {
  std::vector<at::Tensor> all, rows;
  for (const at::Tensor& row : spread_over(reduction, value, 2)) {
    const std::vector<at::Tensor> pieces = spread_over(reduction, row, 2);
    all.insert(all.end(), pieces.begin(), pieces.end());
    rows.push_back(value_of(reduction, pieces));
  }
  return is_close(value_of(reduction, all), value) && is_close(value_of(reduction, rows), value);
}

void try_spread(const Reduction& reduction, const at::Tensor& value, const std::string& who, bool nested) {
  check_neutral(reduction, value.scalar_type(), who);
  for (const int64_t ranks : {2, 3}) {
    const char* const wrong = wrong_method(reduction, value, ranks);
    if (wrong == nullptr) continue;
    throw std::invalid_argument(
        fmt::format("{}: the pieces that P({}) makes of a value do not reduce to that value (tried over {} ranks): its "
                    "terms are not its pieces, so implement Reduction::{}, or mend it",
                    who, reduction.text(), ranks, wrong));
  }
  if (!nested || nests(reduction, value)) return;
  throw std::invalid_argument(
      fmt::format("{}: the value of P({}) over two mesh dimensions is not the same where both are reduced at once and "
                  "where one is reduced after the other (tried over 2 x 2 ranks); implement Reduction::from_terms so "
                  "that it is",
                  who, reduction.text()));
}

}  // namespace

void check_spread(const Reduction& reduction, at::ScalarType dtype, const std::string& who, bool nested) {
  const detail::NotDeferred own_tensors;
  const bool is_small = c10::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
  try {
    try_spread(reduction, probe_of(c10::elementSize(dtype) < 2 && is_small ? at::kFloat : dtype), who, nested);
  } catch (const c10::NotImplementedError&) {
    // The CPU lacks an operator of this dtype that the pieces' device may have.
    if (!is_small) throw;
    try_spread(reduction, probe_of(at::kFloat), who, nested);
  }
}

Reduction::Reduction(const std::string& text, ReduceOp op) : Described(text), op_(op) {
  if (op != ReduceOp::kAvg) return;
  throw std::invalid_argument(
      fmt::format("Reduction: {} reduces its terms by avg; reduce by sum and divide in from_terms", text));
}

at::Tensor Reduction::to_term(const at::Tensor& piece) const { return piece; }
at::Tensor Reduction::from_terms(const at::Tensor& terms, int64_t) const { return terms; }
at::Tensor Reduction::only_piece(const at::Tensor& value, int64_t) const { return value; }
c10::Scalar Reduction::neutral(at::ScalarType dtype) const { return neutral_of(op_, dtype); }
std::optional<double> Reduction::slope(int64_t) const { return std::nullopt; }
void Reduction::check(at::ScalarType dtype, const std::string& who) const { check_reduces(op_, dtype, who); }

at::Tensor Reduction::spread(const at::Tensor& value, int64_t coordinate, int64_t) const {
  return coordinate == 0 ? value : at::full_like(value, neutral(value.scalar_type()));
}

at::Tensor Reduction::derivative(const at::Tensor&, const Peers&) const {
  throw NotImplemented(fmt::format(
      "from_local: the gradient of a piece of P({}) is not known: implement Reduction::derivative (or slope), or "
      "say in options.grad_placements what the gradient of a piece is to be",
      text()));
}

at::Tensor term_of(const Reduction& reduction, const at::Tensor& piece) {
  at::Tensor out = reduction.to_term(piece);
  check_sizes(out, piece, reduction, "to_term");
  return out;
}

at::Tensor value_of_terms(const Reduction& reduction, const at::Tensor& terms, int64_t ranks) {
  at::Tensor out = reduction.from_terms(terms, ranks);
  check_sizes(out, terms, reduction, "from_terms");
  return out;
}

bool commutes_with_conversion(const Reduction& reduction, at::ScalarType from, at::ScalarType to) {
  if (from == to || from == at::kBool) return true;
  const bool to_integer = c10::isIntegralType(to, /*includeBool=*/false);
  if (to == at::kBool || (to_integer && !c10::isIntegralType(from, /*includeBool=*/false))) return false;
  if (c10::isComplexType(from) && !c10::isComplexType(to)) return reduction.slope(1).has_value();
  // A sum or product wraps around in any integer dtype alike; what a user's reduction makes of a piece does not.
  if (to_integer && !is_plain(reduction)) return holds_all(to, from);
  if (reduction.op() != ReduceOp::kMax && reduction.op() != ReduceOp::kMin) return true;
  // The neutral pieces are the extremes of their dtype.
  return to_integer ? holds_all(to, from) : std::isinf(largest(to));
}

void check_reduces(ReduceOp op, at::ScalarType dtype, const std::string& who) { reduced_as(dtype, op, who.c_str()); }

c10::Scalar neutral_of(ReduceOp op, at::ScalarType dtype) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor: return 0;
    case ReduceOp::kProduct: return 1;
    case ReduceOp::kMax: return extreme(dtype, /*highest=*/false);
    case ReduceOp::kMin: return extreme(dtype, /*highest=*/true);
    case ReduceOp::kBitAnd:  // a number with all bits set
      return c10::isSignedType(dtype) && dtype != at::kBool ? c10::Scalar(-1) : extreme(dtype, /*highest=*/true);
    case ReduceOp::kAvg: break;
  }
  throw std::logic_error("neutral_of: avg has no neutral element");
}

const ReductionPtr& plain_reduction(ReduceOp op) {
  // The table is never destroyed, so copies of these pointers need no reference counts.
  static const auto* const table = [] {
    auto* made = new std::array<ReductionPtr, kPlainReductions.size()>;
    for (const ReduceOp each : kPlainReductions) {
      (*made)[static_cast<std::size_t>(each)] = ReductionPtr(ReductionPtr(), new Plain(each));
    }
    return made;
  }();
  return table->at(static_cast<std::size_t>(op));
}

ReductionPtr norm_reduction(double p) { return std::make_shared<const Norm>(p); }
ReductionPtr masked_reduction(ReduceOp op) { return std::make_shared<const Masked>(op); }

}  // namespace tessera
