#pragma once

#include "tessera/placement/placement.h"

namespace custom_placement {

// Cuts a tensor dimension into two chunks per part and gives part i the i-th chunk from the front and the i-th from the
// back:
//   8 elements over 2 parts -> {0-2, 6-8}, {2-6}
// Under a causal mask, row k of attention costs k + 1 products. With a zigzag every rank has the same work; with plain
// chunks the last rank has almost twice the mean. Source: Megatron-Core's context parallelism, which balances its ranks
// so.
class Zigzag final : public tessera::Partition {
 public:
  Zigzag() : Partition("Zigzag", "") {}

  tessera::Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    const tessera::Interval front = tessera::chunk_range(size, 2 * parts, index);
    const tessera::Interval back = tessera::chunk_range(size, 2 * parts, 2 * parts - 1 - index);
    tessera::Intervals out;
    tessera::append(out, front);
    tessera::append(out, back);
    return out;
  }
};

// Returns the placement that is written Zigzag(1), for tensor dimension 1.
inline tessera::Placement ZigzagShard(int64_t tensor_dim) {
  return tessera::Shard(tensor_dim, std::make_shared<const Zigzag>());
}

}  // namespace custom_placement
