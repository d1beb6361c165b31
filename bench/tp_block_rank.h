#pragma once

#include <string>

namespace tessera::bench {

// Runs one of our ranks: executes the commands that tools/bench tp_block sends over `socket`, until that ends.
//
//   case HIDDEN SEQUENCE BATCH HEADS         ->   ok
//   digest WAY                               ->   SUM MAGNITUDE of this rank's output, of the input's gradient, and of
//                                                 each parameter's gradient
//   hand CALLS, styles CALLS, layers CALLS   ->   microseconds per step of forward and backward
void serve_tp_block(const std::string& socket);

}  // namespace tessera::bench
