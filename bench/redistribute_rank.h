#pragma once

#include <string>

namespace tessera::bench {

// Runs one of our ranks: executes the commands that tools/bench redistribute sends over `socket`, until that ends.
//
//   case MESH;SHAPE;FROM;TO   ->   ELEMENTS CHECKSUM COMMUNICATES of this rank's result; raw calls must give the same
//   ours CALLS, raw CALLS     ->   microseconds per call
void serve_redistribute(const std::string& socket);

}  // namespace tessera::bench
