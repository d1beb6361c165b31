#pragma once

#include <string>

namespace tessera::bench {

// Runs one of our ranks: executes the commands that tools/bench cross_entropy sends over `socket`, until that ends.
//
//   case DTYPE TOKENS CLASSES   ->   BYTES of this rank's logits
//   digest WAY                  ->   LOSS, and SUM MAGNITUDE of this rank's gradient
//   peak WAY                    ->   peak bytes of tensors in a step; of earlier tensors only the logits count
//   ours CALLS, gather CALLS    ->   microseconds per step of forward and backward
void serve_cross_entropy(const std::string& socket);

}  // namespace tessera::bench
