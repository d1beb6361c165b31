#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/reduce_op.h"
#include "tessera/placement/described.h"

namespace tessera {

// A reduction that is still to be carried out over the ranks of a mesh dimension: what stands behind Partial and its
// kind. Each rank holds a piece of the value's own shape; the value is
//   from_terms(op over the ranks of to_term(piece), number of ranks)
// element by element. Open: derive from it and `Partial(std::make_shared<const Mine>(...))` is a placement. Immutable;
// called from any thread, with tensors that do not require grad.
class Reduction : public Described {
 public:
  // `text` is what the placement shows in P(...); `op` is how the terms are reduced. Throws std::invalid_argument when
  // it is avg.
  Reduction(const std::string& text, ReduceOp op);

  ReduceOp op() const { return op_; }

  // A piece as a term of `op`: of a wider dtype where one of the piece's own would overflow, and then so much more is
  // sent than a plan says. The result may be the piece itself, which is not to be written.
  virtual at::Tensor to_term(const at::Tensor& piece) const;
  // The reduced terms of `ranks` ranks as the value, in their dtype. The result may be `terms`, which is not to be
  // written.
  virtual at::Tensor from_terms(const at::Tensor& terms, int64_t ranks) const;

  // What makes the placement a target: the piece of the rank at `coordinate` of `ranks` when the value is `value`,
  // which all of them hold. By default the value at coordinate 0 and neutral() elsewhere.
  virtual at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const;
  // The piece that adds nothing. By default that of op.
  virtual c10::Scalar neutral(at::ScalarType dtype) const;
  // The piece of the only rank whose piece is not neutral, when the value is `value`. By default the value.
  virtual at::Tensor only_piece(const at::Tensor& value, int64_t ranks) const;

  // When the value is one number times the sum of the pieces, that number, not 0: d value / d piece (1 for sum, 1 /
  // ranks for avg). Such a reduction commutes with others of its kind, and becomes one by scaling the pieces. nullopt
  // otherwise.
  virtual std::optional<double> slope(int64_t ranks) const;
  // Otherwise: d value / d piece, element by element, of complex numbers its conjugate, by which autograd multiplies
  // gradients. By default throws std::runtime_error that names what is missing.
  struct Peers {
    int64_t ranks;
    // Reduces over them; every rank must call it alike.
    std::function<at::Tensor(const at::Tensor&, ReduceOp)> all_reduce;
  };
  virtual at::Tensor derivative(const at::Tensor& piece, const Peers& peers) const;

  // Throws std::invalid_argument, prefixed with `who`, when pieces of `dtype` cannot be reduced. By default by op.
  virtual void check(at::ScalarType dtype, const std::string& who) const;

  // The reduction that pieces await, once they are what they are to be: of a masked sum, sum. Itself when nullptr.
  virtual std::shared_ptr<const Reduction> awaited() const { return nullptr; }

 private:
  const ReduceOp op_;
};
using ReductionPtr = std::shared_ptr<const Reduction>;

// Throws std::invalid_argument, prefixed with `who`, when `op` has no meaning for `dtype`: avg of integers, sum,
// product or avg of bool, max or min of complex numbers, bit operations on anything but integers and bool.
void check_reduces(ReduceOp op, at::ScalarType dtype, const std::string& who);
// Throws std::invalid_argument, prefixed with `who` and naming the method to implement, when the pieces that
// `reduction` makes of a value, by spread() or by only_piece() and neutral(), do not reduce to that value. Tries it on
// three small positive numbers.
void check_forms(const Reduction& reduction, at::ScalarType dtype, const std::string& who);
// The x for which op(x, y) == y; not of avg.
c10::Scalar neutral_of(ReduceOp op, at::ScalarType dtype);

// The plain ones, avg among them: "sum", "avg", "max", "min", "product", "bit_and", "bit_or", "bit_xor".
const ReductionPtr& plain_reduction(ReduceOp op);
// (sum of |x|^p)^(1/p) of floating numbers, p finite and not 0: how a norm over a sharded dimension waits. A value that
// has it is never negative: spread() throws std::runtime_error on one that is. "norm 2".
ReductionPtr norm_reduction(double p);
// By `op`, of the elements where a mask is true, which from_local is given with the piece (FromLocalOptions::mask) and
// applies: the others become neutral, and get no gradient. "masked sum".
ReductionPtr masked_reduction(ReduceOp op);

}  // namespace tessera
