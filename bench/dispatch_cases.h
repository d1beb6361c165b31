#pragma once

#include <vector>

#include "tessera/bench/measure.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::bench {

// One call, on DTensors and on plain tensors of their pieces' sizes, and what is wanted of it.
struct Case {
  Subject subject;
  double most_added = 0;  // microseconds over plain at most; 0: not asked
  double most_times = 0;  // of plain's time at most; 0: not asked
};

// On a mesh of one dimension in a world that moves nothing; those of a first call make meshes of more. Tensors have 8 x
// 8 elements on 8 ranks, so that a call's own work is least; an optimizer's have 256 x 256 a piece.
std::vector<Case> dispatch_cases(const DeviceMesh& mesh);

}  // namespace tessera::bench
