#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/region.h"
#include "tessera/dtensor/redistribute/step_on_rank.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/placement/reduction.h"

namespace tessera {

// Runs a step that communicates, prepared for this rank: it knows which regions of its piece are sent, by which
// collective, and where in the result the received regions are stored.
class Transfer {
 public:
  explicit Transfer(const StepOnRank& at);
  // Makes an all-to-all over a 1-D mesh of which this rank is member `me`.
  Transfer(const Exchange& exchange, std::size_t me);

  PlanStep::Kind kind() const { return kind_; }
  const std::vector<int64_t>& mesh_dims() const { return mesh_dims_; }
  ReduceOp op() const { return reductions_[0].first->op(); }
  bool reduces() const { return !reductions_.empty(); }

  // Returns the tensor that sends() refers to: the row-major piece, or the piece as terms of the reduction. It throws
  // std::invalid_argument, as completed() does, when a user's reduction changes the sizes (term_of).
  at::Tensor input_of(const at::Tensor& piece) const;
  // sends() are the regions of the input that are sent, receives() those of the result that are received: one per rank
  // of the group, or a single one where all ranks get or send the same.
  const std::vector<Region>& sends() const { return sends_; }
  const std::vector<Region>& receives() const { return receives_; }

  // Says whether unpacked() and completed() need the tensor that input_of() returned.
  bool keeps_input() const { return copied_locally_.has_value(); }

  // For a transfer with a collective of its own: packed() returns what is sent, as one flat tensor that shares the
  // memory of `input` unless packs(); send_counts() has the elements for each receiver, receive_counts() those from
  // each sender; unpacked() makes the result of what was received.
  bool packs() const { return !sends_in_sequence_; }
  at::Tensor packed(const at::Tensor& input) const;
  const std::vector<int64_t>& send_counts() const { return send_counts_; }
  const std::vector<int64_t>& receive_counts() const { return receive_counts_; }
  at::Tensor unpacked(at::Tensor received, const at::Tensor& input) const;

  // Says whether what is received is what completed() takes, in its order.
  bool receives_result() const { return receives_in_sequence_ && receives_.size() == 1; }
  // For transfers that share a collective: empty_result() makes the tensor that received regions are stored in, and
  // completed() finishes it once all of them are.
  at::Tensor empty_result(const at::TensorOptions& options) const;
  at::Tensor completed(at::Tensor value, const at::Tensor& input) const;

 private:
  // Fill sends_, receives_ and the other members for the step's collective; they start nothing.
  void prepare_all_gather(const StepOnRank& at);
  void prepare_exchange(const Exchange& exchange, std::size_t me);
  void prepare_all_reduce(const StepOnRank& at);
  void prepare_reduce_scatter(const StepOnRank& at);
  void add_reductions(const StepOnRank& at);
  void count();

  PlanStep::Kind kind_;
  std::vector<int64_t> mesh_dims_;
  // Lists the parts of the piece that all ranks of the group reduce, one after the other; empty if that is the whole
  // piece.
  std::vector<Region> needed_;
  std::vector<Region> sends_;
  std::vector<Region> receives_;
  // Holds the part that this rank copies from its input to the result without the collective, as a region of each;
  // empty if there is none.
  std::optional<std::pair<Region, Region>> copied_locally_;
  std::vector<int64_t> send_counts_;
  std::vector<int64_t> receive_counts_;
  int64_t send_sum_ = 0;
  bool sends_in_sequence_ = false;  // they are adjacent in memory, so nothing is packed
  bool receives_in_sequence_ = false;
  std::vector<int64_t> sizes_;  // of the received tensor
  // Holds, after an all-reduce, offset and sizes of the part of the received tensor that is this rank's result; empty
  // if that is all of it.
  std::optional<std::pair<int64_t, std::vector<int64_t>>> part_of_all_reduce_;
  at::ScalarType dtype_ = at::kFloat;                         // the reduced value's; terms may be wider
  std::vector<std::pair<ReductionPtr, int64_t>> reductions_;  // done together, each over that number of ranks
};

}  // namespace tessera
