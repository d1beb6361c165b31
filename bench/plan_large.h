#pragma once

#include <string>
#include <vector>

#include "tessera/bench/measure.h"
#include "tessera/bench/plan_pairs.h"

namespace tessera::bench {

// Microseconds of processor time of this thread since some start. Planning waits for nothing, so the time of other
// processes on the machine is left out.
double processor_microseconds();

// Plans on one mesh that is too large for a search of the optimum.
struct LargeMesh {
  std::string mesh, tensor, model;
  int64_t pairs = 0;
  double microseconds = 0;  // the time that the model gives the plans, summed
  double bytes = 0;         // received by the rank that receives most, summed over steps and plans
  int64_t steps = 0;
  Figure planning;  // microseconds per plan
  double worst = 0;
};

// Plans each drawn pair once under each of two models, on meshes of 512 and of 4,096 ranks, the latter also as 12 mesh
// dimensions. `pairs_per_row` is the number of pairs for a mesh and a kind of tensor; a mesh of 12 dimensions gets a
// third of it.
std::vector<LargeMesh> plan_on_large_meshes(std::size_t pairs_per_row);

}  // namespace tessera::bench
