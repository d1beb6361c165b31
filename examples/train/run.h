#pragma once

#include <functional>
#include <memory>

#include "tessera/examples/train/options.h"
#include "tessera/mesh/world.h"

namespace train {

// Says how a run is stopped before its end.
struct Stop {
  // Says whether this rank is asked to stop.
  std::function<bool()> is_asked;
  // Is called when the last step is saved: from then on the process may end at once.
  std::function<void()> on_saved;
};

// Trains on all ranks of `world`, which has as many as options.mesh asks for, and returns the program's exit code. Rank
// 0 writes the run's folder and prints. After each step all ranks agree whether stop.is_asked() is true on any of them;
// the run is then saved and ends.
//
// Throws std::invalid_argument, alike on every rank, when the options do not fit the world, the data or the run's
// folder, or another process trains in that folder; std::runtime_error when the loss is not finite, and when the folder
// cannot be written.
int run(const Parsed& parsed, const std::shared_ptr<tessera::World>& world, const Stop& stop);

}  // namespace train
