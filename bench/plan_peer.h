#pragma once

#include "tessera/bench/plan_pairs.h"

namespace tessera::bench {

// PyTorch's plans of one mesh and tensor beside ours.
struct Comparison {
  std::string mesh, shape;
  int64_t pairs = 0;
  int64_t unsupported = 0;  // PyTorch plans no way
  int64_t wrong = 0;        // a step of PyTorch's needs elements that its group does not hold (uneven nested shards)
  int64_t peer_steps = 0, our_steps = 0;  // that communicate, where both plan
  // Received by the rank that receives most, summed over the steps: counted in the collectives that PyTorch runs on CPU
  // tensors; its steps, each carried out with the fewest bytes; our plan by bytes_only.
  double peer_bytes = 0, peer_least_bytes = 0, our_bytes = 0;
  Ratios peer_to_ours, peer_least_to_ours;
};

// `command` answers what plan_quality_peer.py does. Throws std::runtime_error when it does not answer every request.
Comparison compare_with_peer(const Mesh& mesh, const Sizes& shape, std::size_t most_pairs, const std::string& command);

}  // namespace tessera::bench
