#pragma once

namespace train {

// Says how long the parts of a step took on one rank, in seconds.
struct StepTimes {
  double forward = 0;    // of all micro-batches together, with the reading of samples
  double backward = 0;   // with the reduction of gradients
  double optimizer = 0;  // with the clipping of gradients
};

}  // namespace train
