#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/region.h"
#include "tessera/dtensor/redistribute/step_on_rank.h"
#include "tessera/placement/reduction.h"

namespace tessera {

// Runs a step without communication, prepared for this rank: a placement that becomes Shard is sliced, one that becomes
// Partial is formed from the value, and a Partial that becomes another Partial is scaled.
class LocalStep {
 public:
  explicit LocalStep(const StepOnRank& at);

  // Runs the step on a piece of any strides; the result may be a view of it. Throws std::invalid_argument when a user's
  // reduction makes a piece of other sizes than the value's. It may throw on this rank alone, since a reduction reads
  // values that only some ranks hold.
  at::Tensor run(const at::Tensor& piece) const;

 private:
  struct Forming {
    ReductionPtr reduction;
    int64_t coordinate;
    int64_t ranks;
  };
  at::Tensor embed(const at::Tensor& piece) const;

  Region slice_;                  // the part of the piece that stays
  std::optional<Region> inside_;  // where that part lies in the result, if embedded_ is not empty
  std::vector<int64_t> sizes_;
  std::vector<Forming> formed_;  // Partials formed from a replicated value
  double scale_ = 1;             // between pieces of two linear reductions
  // Is set for a reduction that stays pending on other mesh dimensions while this step forms pieces. Its piece may have
  // values that no reduced value has, such as a negative norm piece; run() turns it into one that spread() and
  // only_piece() accept.
  ReductionPtr stays_pending_;
  std::vector<Forming> embedded_;  // Partials formed from a Shard's piece
};

}  // namespace tessera
