#pragma once

#include <string>

namespace tessera::bench {

// One of our ranks: does what tools/bench redistribute tells it at `socket`, until that ends.
//
//   case MESH;SHAPE;FROM;TO   -> ELEMENTS CHECKSUM COMMUNICATES of the result here; raw calls must give the same
//                             elements
//   ours CALLS, raw CALLS     ->   microseconds a call
void serve_redistribute(const std::string& socket);

}  // namespace tessera::bench
