#pragma once

#include <vector>

#include "tessera/bench/measure.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::bench {

// Describes one call, on DTensors and on plain tensors of their pieces' sizes, and its goals.
struct Case {
  Subject subject;
  double most_added = 0;  // limit of the time added to plain's, in microseconds; 0: no goal
  double most_times = 0;  // limit of the time over plain's; 0: no goal
};

// Returns the calls on a 1-D mesh in a fake world; the cases of a first call make meshes of up to three dimensions.
// Most tensors have 8 x 8 elements on 8 ranks, so that the operator itself takes little time; a first call's have 64 x
// 64, and an optimizer's 256 x 256 per piece.
std::vector<Case> dispatch_cases(const DeviceMesh& mesh);

}  // namespace tessera::bench
