#pragma once

#include <cstdint>

namespace tessera {

// Is what a checkpoint has to keep of a LossScaler; a TrainingState keeps it where its `scaler` is set.
struct LossScalerState {
  double scale = 0;
  int64_t good_steps = 0;  // since the scale last changed

  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

}  // namespace tessera
