#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/decision.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"

namespace tessera::dispatch {

// Holds the pieces that an operator runs on, one for each of Call::tensors.
using Pieces = c10::SmallVector<at::Tensor, 6>;

// Holds the tensors that a call writes, in place or as out=, while the operator runs on pieces.
//
// They are written in copies where the decision computes them in another layout (Decision::write_back), and where the
// results' sizes are not known beforehand, since LibTorch may resize what it writes. Most calls write nothing: for
// these, the functions return at once.
class WrittenArguments {
 public:
  WrittenArguments(const Call& call, const Decision& decision) : call_(call), decision_(decision) {}

  // Keeps the wrappers, which an in-place operator returns, and puts copies in the place of pieces. Throws, and fails
  // the World, where two arguments overlap in memory so that one copy would lose what is written into the other.
  void prepare(Pieces& pieces) {
    if (!call_.traits.written_args.empty()) keep(pieces);
  }

  // After the operator: throws if LibTorch has resized a piece. Where the result's shape was not known before, this is
  // the first moment that shows it, on every rank.
  void refuse_resized(const Pieces& pieces) const {
    for (const Argument& each : arguments_) check_size(each, pieces);
  }
  // Copies back what was written in copies, by a redistribution where the layouts differ.
  void write_back(const Pieces& pieces) const {
    if (!arguments_.empty() && in_copies()) copy_back(pieces);
  }
  // Counts the write of each.
  void note_writes() const {
    for (const Argument& each : arguments_) detail::note_write(detail::meta(each.wrapper));
  }

  // Returns the written tensor that the call's result `i` is, or nullptr.
  const at::Tensor* result(std::size_t i) const { return arguments_.empty() ? nullptr : find(i); }

 private:
  struct Argument {
    std::size_t index;  // index in call.tensors
    at::Tensor wrapper;
  };

  bool in_copies() const { return decision_.write_back || decision_.outputs_from_local; }
  void keep(Pieces& pieces);
  void copy(std::size_t i, Pieces& pieces) const;
  void check_size(const Argument& argument, const Pieces& pieces) const;
  void copy_back(const Pieces& pieces) const;
  const at::Tensor* find(std::size_t i) const;
  [[noreturn]] void refuse_overlap() const;

  const Call& call_;
  const Decision& decision_;
  c10::SmallVector<Argument, 2> arguments_;
};

}  // namespace tessera::dispatch
