#pragma once

#include <string>

namespace tessera::bench {

// One of our ranks: does what tools/bench cross_entropy tells it at `socket`, until that ends.
//
//   case DTYPE TOKENS CLASSES   ->   BYTES of this rank's logits
//   digest WAY                  ->   LOSS, and SUM MAGNITUDE of the gradient here
//   peak WAY                    -> the most bytes that tensors hold in a step, of what was there before the logits
//                               alone
//   ours CALLS, gather CALLS    ->   microseconds of a step: forward and backward
void serve_cross_entropy(const std::string& socket);

}  // namespace tessera::bench
