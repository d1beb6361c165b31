#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/place.h"
#include "tessera/dtensor/region.h"
#include "tessera/placement/reduction.h"

namespace tessera {

// A step in which nothing is sent: what becomes a Shard is sliced, what becomes a Partial is formed.
class LocalStep {
 public:
  explicit LocalStep(const Place& at);

  // Whether a reduction sees what this rank alone holds, so that it may throw here alone.
  bool looks_at_own_values() const { return !embedded_.empty(); }
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
  // That stays pending on other mesh dimensions: a piece of it alone may be what no value is, such as a norm's negative one.
  ReductionPtr pending_;
  std::vector<Forming> embedded_;  // of a Shard's piece
};

}  // namespace tessera
