#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/reduce_op.h"
#include "tessera/placement/described.h"

namespace tessera {

// Describes a reduction that is still to be done over the ranks of a mesh dimension. Partial, NormPartial and
// MaskedPartial are placements over a Reduction. Each rank holds a piece of the value's own shape, and the value is,
// element by element,
//   from_terms(op over the ranks of to_term(piece), number of ranks)
// To add one, derive from this class; then `Partial(std::make_shared<const Mine>(...))` is a placement. Objects are
// immutable and are called from any thread, with tensors that do not require grad. Two Reductions of one class are one
// and the same where their texts are equal: one may be used in the place of the other, so a parameter must be in the
// text.
class Reduction : public Described {
 public:
  // Is thrown by the default of a method that cannot do without an implementation, so alike on every rank.
  struct NotImplemented : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  // `text` is what the placement shows in P(...), and `op` reduces the terms. Throws std::invalid_argument when `op` is
  // avg.
  Reduction(const std::string& text, ReduceOp op);

  ReduceOp op() const { return op_; }

  // Returns the piece as a term of `op`, element by element: the term has the sizes of `piece`, which may be any part
  // of a rank's piece, also a flattened one. The term has a wider dtype where the sum of terms of the piece's own dtype
  // would overflow; more bytes are then sent than the plan says. The result may be the piece itself: do not write to
  // it.
  virtual at::Tensor to_term(const at::Tensor& piece) const;
  // Returns the value from the reduced terms of `ranks` ranks, element by element: in the sizes and the dtype of
  // `terms`, which may be those of any part of the pieces, also a flattened one. The result may be `terms` itself: do
  // not write to it. Where the reduction is pending over several mesh dimensions, it may be done over all of them at
  // once, or over one after the other, where the value over the first ones is a piece of the next. Both must give the
  // same: from_terms of the terms of a * b ranks, and from_terms over b ranks of the terms of what from_terms gives
  // over a ranks.
  virtual at::Tensor from_terms(const at::Tensor& terms, int64_t ranks) const;

  // Returns the piece of the rank at `coordinate` of `ranks` for a value that all of them hold. This makes the
  // placement a target of redistribute. By default it is the value at coordinate 0 and neutral() elsewhere. A piece has
  // the value's sizes. One of another dtype is converted to the value's, here and in only_piece().
  virtual at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const;
  // Returns the piece that does not change the value. By default it is the neutral element of op.
  virtual c10::Scalar neutral(at::ScalarType dtype) const;
  // Returns the piece of a rank when the value is `value` and every other rank's piece is neutral. By default it is the
  // value.
  virtual at::Tensor only_piece(const at::Tensor& value, int64_t ranks) const;

  // If the value is one nonzero number times the sum of the pieces, returns that number, which is d value / d piece: 1
  // for sum, 1 / ranks for avg. Such reductions commute, and one becomes another by scaling the pieces. Otherwise
  // returns nullopt.
  virtual std::optional<double> slope(int64_t ranks) const;
  // Where there is no slope: returns d value / d piece, element by element, by which autograd multiplies gradients; for
  // complex numbers, its conjugate. By default throws NotImplemented, which names the method to implement.
  struct Peers {
    int64_t ranks;
    // Reduces over these ranks. It is a collective: every rank must call it with the same shape, dtype and op.
    std::function<at::Tensor(const at::Tensor&, ReduceOp)> all_reduce;
  };
  virtual at::Tensor derivative(const at::Tensor& piece, const Peers& peers) const;

  // Throws std::invalid_argument, prefixed with `who`, when pieces of `dtype` cannot be reduced. By default op decides.
  virtual void check(at::ScalarType dtype, const std::string& who) const;

  // Returns the reduction that remains after from_local has prepared the pieces: sum for a masked sum, whose mask has
  // been applied. nullptr means this one.
  virtual std::shared_ptr<const Reduction> unmasked() const { return nullptr; }

 private:
  const ReduceOp op_;
};
using ReductionPtr = std::shared_ptr<const Reduction>;

// Return reduction.to_term(piece) and reduction.from_terms(terms, ranks). Throw std::invalid_argument where the
// reduction, which may be a user's, returns other sizes than those of what it was given.
at::Tensor term_of(const Reduction& reduction, const at::Tensor& piece);
at::Tensor value_of_terms(const Reduction& reduction, const at::Tensor& terms, int64_t ranks);

// Says whether pieces of dtype `from` may be converted to `to` before they are reduced: whether the value is then the
// converted one, but for rounding and for an overflow of `from`, or of `to` by a piece. A sum of truncated numbers is
// no truncated sum, and the smallest long, which is a neutral piece of max, becomes 0 as an int.
bool commutes_with_conversion(const Reduction& reduction, at::ScalarType from, at::ScalarType to);

// Throws std::invalid_argument, prefixed with `who`, when `op` has no meaning for `dtype`: avg of integers, sum,
// product or avg of bool, max or min of complex numbers, bit operations on anything but integers and bool.
void check_reduces(ReduceOp op, at::ScalarType dtype, const std::string& who);
// Throws std::invalid_argument, prefixed with `who`, when a value that is cut into pieces, by spread() or by
// only_piece() and neutral(), is not the reduction of these pieces. The text names the method to implement. It is tried
// on three small positive numbers of `dtype`, or complex ones of positive parts, on the CPU; on floats where that
// cannot compute them, and for float8. With `nested` it is also tried over two mesh dimensions, which are reduced at
// once and one after the other.
void check_spread(const Reduction& reduction, at::ScalarType dtype, const std::string& who, bool nested = false);
// Returns the x for which op(x, y) == y. There is none for avg.
c10::Scalar neutral_of(ReduceOp op, at::ScalarType dtype);

// Returns the reduction by one op, which may be avg. Its text is one of "sum", "avg", "max", "min", "product",
// "bit_and", "bit_or", "bit_xor".
const ReductionPtr& plain_reduction(ReduceOp op);
// The value is (sum of |x|^p)^(1/p) of floating numbers, with p finite and not 0: this is the pending form of a norm
// over a sharded dimension. Such a value is never negative; on a negative one spread() throws std::runtime_error, and
// on a GPU a check fails there (mesh/core/device_checks.h). Its text is e.g. "norm 2".
ReductionPtr norm_reduction(double p);
// Reduces by `op` the elements where a mask is true. from_local is given the mask (FromLocalOptions::mask) and applies
// it: the other elements become neutral and get no gradient. Its text is e.g. "masked sum".
ReductionPtr masked_reduction(ReduceOp op);

}  // namespace tessera
