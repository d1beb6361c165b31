#pragma once

#include <string>

namespace tessera::bench {

// Runs one of our ranks: executes the commands that tools/bench train sends over `socket`, until that ends.
//
//   case DP TP ZERO HIDDEN LAYERS HEADS SEQUENCE BATCH   ->   ok
//   losses WAY STEPS                                     ->   the mean loss of each of these steps, from the first one
//   hand STEPS, ours STEPS                               ->   microseconds per step
void serve_train(const std::string& socket);

}  // namespace tessera::bench
