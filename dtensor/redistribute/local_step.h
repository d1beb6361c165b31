#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/region.h"
#include "tessera/dtensor/redistribute/step_on_rank.h"
#include "tessera/placement/reduction.h"

namespace tessera {

// A step in which nothing is sent: what becomes a Shard is sliced, what becomes a Partial is formed,
// and a Partial that becomes another is scaled.
class LocalStep {
 public:
  explicit LocalStep(const StepOnRank& at);

  // Whether a reduction sees what some ranks alone hold, so that it may throw there alone.
  bool looks_at_own_values() const { return !embedded_.empty() || !formed_.empty() || pending_ != nullptr; }
  // A piece of any strides; the result may be a view of it.
  at::Tensor run(const at::Tensor& piece) const;

 private:
  struct Forming {
    ReductionPtr reduction;
    int64_t coordinate;
    int64_t ranks;
  };
  at::Tensor embed(const at::Tensor& piece) const;

  Region slice_;
  std::optional<Region> inside_;
  std::vector<int64_t> sizes_;
  std::vector<Forming> formed_;  // of the whole value
  double scale_ = 1;             // of a piece of one linear reduction as a piece of another
  // That stays pending on other mesh dimensions: a piece of it alone may be what no value is, such as a norm's negative
  // one.
  ReductionPtr pending_;
  std::vector<Forming> embedded_;  // of a Shard's piece
};

}  // namespace tessera
