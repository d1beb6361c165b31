#pragma once

#include <ATen/ops/eq.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/placement/placement.h"
#include "tessera/placement/reduction.h"

namespace custom_placement {

// A pending reduction whose value is the root mean square of numbers of which every rank holds equally many. A rank's
// piece is the root mean square of its own numbers; terms are float32 at least, since a square in float16 may overflow.
// An RMSNorm over a sharded hidden dimension needs it.
class RootMeanSquare final : public tessera::Reduction {
 public:
  RootMeanSquare() : Reduction("rms", tessera::ReduceOp::kSum) {}

  at::Tensor to_term(const at::Tensor& piece) const override {
    const bool narrow = c10::elementSize(piece.scalar_type()) < 4;
    return (narrow ? piece.to(at::kFloat) : piece).square();
  }
  at::Tensor from_terms(const at::Tensor& terms, int64_t ranks) const override { return terms.div(ranks).sqrt(); }

  // Every rank gets the same piece, since the root mean square of equal numbers is their magnitude.
  at::Tensor spread(const at::Tensor& value, int64_t, int64_t) const override { return checked(value); }
  // The other ranks' pieces are zeros. The mean square is then piece * piece / ranks, so the piece is value *
  // sqrt(ranks).
  at::Tensor only_piece(const at::Tensor& value, int64_t ranks) const override {
    return checked(value).mul(std::sqrt(static_cast<double>(ranks)));
  }

  at::Tensor derivative(const at::Tensor& piece, const Peers& peers) const override {
    const at::Tensor value = from_terms(peers.all_reduce(to_term(piece), tessera::ReduceOp::kSum), peers.ranks);
    const at::Tensor out = at::where(at::eq(value, 0), at::zeros_like(value), piece.div(value.mul(peers.ranks)));
    return out.to(piece.scalar_type());
  }

  void check(at::ScalarType dtype, const std::string& who) const override {
    if (c10::isFloatingType(dtype)) return;
    throw std::invalid_argument(who + ": P(rms) of " + c10::toString(dtype) +
                                " is not defined; convert to a floating dtype");
  }

 private:
  static at::Tensor checked(const at::Tensor& value) {
    if (!at::lt(value, 0).any().item<bool>()) return value;
    throw std::runtime_error("a value with negative elements cannot be P(rms), which is never negative");
  }
};

// Returns the placement that is written P(rms).
inline tessera::Placement RmsPartial() { return tessera::Partial(std::make_shared<const RootMeanSquare>()); }

}  // namespace custom_placement
