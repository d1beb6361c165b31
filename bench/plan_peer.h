#pragma once

#include "tessera/bench/plan_pairs.h"

namespace tessera::bench {

// Compares PyTorch's plans of one mesh and tensor with ours.
struct Comparison {
  std::string mesh, shape;
  int64_t pairs = 0;
  int64_t unsupported = 0;  // pairs for which PyTorch has no plan
  int64_t wrong = 0;        // a step of PyTorch's needs elements that its group does not hold (uneven nested shards)
  int64_t peer_steps = 0, our_steps = 0;  // steps that communicate, where both have a plan
  // These are the bytes received by the rank that receives most, summed over the steps: those counted in the
  // collectives that PyTorch runs on CPU tensors; those of PyTorch's steps if each used the fewest bytes; those of our
  // plan by bytes_only.
  double peer_bytes = 0, peer_least_bytes = 0, our_bytes = 0;
  Ratios peer_to_ours, peer_least_to_ours;
};

// `command` runs plan_quality_peer.py, or a program that answers the same requests. Throws std::runtime_error when it
// does not answer every request.
Comparison compare_with_peer(const Mesh& mesh, const Sizes& shape, std::size_t most_pairs, const std::string& command);

}  // namespace tessera::bench
