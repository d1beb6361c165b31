#pragma once

#include <string>

namespace tessera::bench {

// Runs one of our ranks: executes the commands that tools/bench train sends over `socket`, until that ends.
//
//   case DP TP ZERO HIDDEN LAYERS HEADS SEQUENCE BATCH   ->   ok
//   losses WAY STEPS                                     ->   loss and norm of the gradients of each of these steps
//   hand STEPS, ours STEPS                               ->   microseconds per step
void serve_train(const std::string& socket);

}  // namespace tessera::bench
