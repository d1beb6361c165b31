#pragma once

#include <string>

namespace tessera::bench {

// One of our ranks: does what tools/bench tp_block tells it at `socket`, until that ends.
//
//   case HIDDEN SEQUENCE BATCH HEADS         ->   ok
//   digest WAY                               -> SUM MAGNITUDE of the output, the input's gradient, and each parameter's
//                                            here
//   hand CALLS, styles CALLS, layers CALLS   ->   microseconds of a step: forward and backward
void serve_tp_block(const std::string& socket);

}  // namespace tessera::bench
