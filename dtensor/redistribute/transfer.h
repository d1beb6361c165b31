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

// A step that communicates, made ready for this rank: which regions of its piece go, by which collective, and where in
// the result what comes is put.
class Transfer {
 public:
  explicit Transfer(const StepOnRank& at);
  // An all-to-all over a mesh of one dimension, this rank being member `me` of it.
  Transfer(const Exchange& exchange, std::size_t me);

  PlanStep::Kind kind() const { return kind_; }
  const std::vector<int64_t>& mesh_dims() const { return mesh_dims_; }
  ReduceOp op() const { return reductions_[0].first->op(); }
  bool reduces() const { return !reductions_.empty(); }

  // What regions are of: the piece, row-major, or its terms of the reduction.
  at::Tensor input_of(const at::Tensor& piece) const;
  // The regions of it that go: one a receiver, or one alone when all get the same; and of the result that come: one a
  // sender, or one alone.
  const std::vector<Region>& gives() const { return gives_; }
  const std::vector<Region>& takes() const { return takes_; }

  // Whether result() and completed() need what input_of() gave.
  bool keeps_input() const { return stays_.has_value(); }

  // The collective of this transfer alone, on what input_of() gave, and the result of what has come. An input that is
  // `owned`, shared with nobody who may read it later, is reduced in place.
  PendingCollective start(const DeviceMesh& mesh, const at::Tensor& input, bool owned) const;
  at::Tensor result(at::Tensor received, const at::Tensor& input) const;
  // The same in parts, where several transfers share a collective: an empty result, and what is left to do when all
  // that comes has been put into it.
  at::Tensor empty_result(const at::TensorOptions& options) const;
  at::Tensor completed(at::Tensor value, const at::Tensor& input) const;

 private:
  void gather(const StepOnRank& at);
  void exchange(const Exchange& exchange, std::size_t me);
  void reduce_all(const StepOnRank& at);
  void reduce_parts(const StepOnRank& at);
  void add_reductions(const StepOnRank& at);
  void count();

  PlanStep::Kind kind_;
  std::vector<int64_t> mesh_dims_;
  std::vector<Region>
      needed_;  // parts of the piece that are reduced by all, one after the other, when not all of it is
  std::vector<Region> gives_;
  std::vector<Region> takes_;
  std::optional<std::pair<Region, Region>> stays_;  // where the part that stays was and is, when it is not among those
  std::vector<int64_t> give_counts_;
  std::vector<int64_t> take_counts_;
  int64_t give_sum_ = 0;
  bool gives_in_sequence_ = false;  // one after the other in memory: nothing to pack
  bool takes_in_sequence_ = false;
  std::vector<int64_t> sizes_;  // of what comes
  std::optional<std::pair<int64_t, std::vector<int64_t>>>
      own_;                            // what is kept of it, when not all: from where on, which sizes
  at::ScalarType dtype_ = at::kFloat;  // of the value, where something is reduced; terms may be wider
  std::vector<std::pair<ReductionPtr, int64_t>> reductions_;  // that are carried out together, each over so many ranks
};

}  // namespace tessera
