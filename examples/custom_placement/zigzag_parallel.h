#pragma once

#include <string>

#include "tessera/examples/custom_placement/zigzag.h"
#include "tessera/styles/style.h"

namespace custom_placement {

// Does what SequenceParallel does, but shards the sequence in a zigzag. It is for norms and other modules that treat
// every position alike.
class ZigzagSequenceParallel final : public tessera::ParallelStyle {
 public:
  explicit ZigzagSequenceParallel(int64_t sequence_dim = 1) : sequence_(ZigzagShard(sequence_dim)) {}

  void apply(tessera::ApplyContext& context) const override {
    for (const tessera::NamedTensor& item : context.tensors()) {
      context.place(item.name, tessera::Replicate());
      if (!item.is_parameter) continue;
      context.contract(item.name, {.operators = {"layer_norm", "rms_norm"}, .input = sequence_, .desired = sequence_});
    }
  }
  std::string name() const override { return "ZigzagSequenceParallel"; }

 private:
  const tessera::Placement sequence_;
};

}  // namespace custom_placement
