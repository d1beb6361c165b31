#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "tessera/dtensor/io/training_state.h"
#include "tessera/examples/train/trainer.h"
#include "tessera/mesh/device_mesh.h"

namespace train {

// Names what a run is one of, such as its data and its model, by values that must not change when it goes on.
using Identity = std::map<std::string, std::string>;

// Holds the training states of a run, in "<run>/checkpoints". Samples need no position of their own: those of a step
// follow from the step.
class Checkpoints {
 public:
  // Keeps the newest `keep` states; 0 keeps all.
  Checkpoints(const std::string& run, int64_t keep);

  // Returns the step of the newest whole state, or nothing if there are no states. Every rank that sees the folder gets
  // the same. Throws as newest_training_state, such as std::invalid_argument where there are states and none is whole.
  std::optional<int64_t> newest() const;

  // Starts to save the state after `step` steps. The values are those of now; a thread writes them. All ranks call
  // these; they communicate as TrainingStateSaver does.
  void start(Trainer& trainer, const tessera::DeviceMesh& mesh, int64_t step, const Identity& identity);
  // Returns when the state is in its folder.
  void wait() { saver_.wait(); }

  // Loads the newest state, on any mesh, and returns its step; goes back to older ones as load_newest_training_state
  // does. Throws std::invalid_argument, on every rank and before anything has changed, where the run was another one
  // than `identity` says; else as load_newest_training_state does.
  int64_t load(Trainer& trainer, const tessera::DeviceMesh& mesh, const Identity& identity) const;

 private:
  const std::string folder_;
  tessera::TrainingStateSaver saver_;
};

}  // namespace train
