#pragma once

#include <memory>
#include <vector>

#include "tessera/examples/train/report.h"
#include "tessera/examples/train/step_times.h"
#include "tessera/mesh/device_mesh.h"

namespace train {

// Notes the collectives of this rank while it lives: it is made before one step.
class StepTrace {
 public:
  explicit StepTrace(const tessera::DeviceMesh& mesh);

  std::vector<CollectiveMoment> moments() const;
  // Returns the collectives by kind and mesh dimension, in the order of their first appearance.
  std::vector<CollectiveCount> counts() const;

 private:
  struct Notes;
  std::shared_ptr<Notes> notes_;
  std::shared_ptr<void> token_;
};

// Returns the times of all ranks, in the mesh's order. All ranks call it. Communication: one all_gather of 24 bytes per
// rank over each mesh dimension.
std::vector<StepTimes> times_of_all_ranks(const StepTimes& here, const tessera::DeviceMesh& mesh);

}  // namespace train
