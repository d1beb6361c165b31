#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/loss_scaler_state.h"
#include "tessera/mesh/device_mesh.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace tessera {

class FusedAdamW;

struct LossScalerOptions {
  double initial_scale = 65536.0;
  double growth_factor = 2.0;      // after growth_interval steps in a row with finite gradients
  double backoff_factor = 0.5;     // after a step with a gradient that is not finite
  int64_t growth_interval = 2000;  // in calls of update()
  // Names the mesh along which ranks hold different parameters, as in clip_grad_norm_.
  std::optional<DeviceMesh> stages = {};
};

// Scales the loss, so that small gradients do not vanish in float16, and the gradients back. Where a gradient is
// infinite or NaN on any rank, every rank leaves out the optimizer's step, and the scale becomes smaller.
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);   // only if gradients are looked at before the step
//   clip_grad_norm_(model->parameters(), 1.0);
//   scaler.step(optimizer);
//   scaler.update();
//
// With several optimizers, each has its own step, and update() comes last; a FusedAdamW is an optimizer too. Every rank
// makes the same calls.
// Source: torch.amp.GradScaler of PyTorch 2.11, whose defaults these are; it has no smallest scale.
class LossScaler {
 public:
  // Is the smallest scale. Gradients that overflow float16 even so are above 10^12: where steps are still left out at
  // this scale, the loss is not finite, or training diverges. Far below it 1 / scale is infinite in float32, so that
  // the next good step would write NaN.
  static constexpr double kMinScale = 0x1p-24;

  // Throws std::invalid_argument on a scale that is infinite or below kMinScale, a growth factor of 1 or less, a
  // backoff factor outside (0, 1), and an interval below 1.
  explicit LossScaler(LossScalerOptions options = {});

  // Returns the loss times the scale. Differentiable.
  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the gradients of the optimizer's parameters by the scale, in place, and finds out whether all are finite on
  // every rank. Parameters may lie on several meshes, as in clip_grad_norm_.
  // Communication, under "LossScaler": one all_reduce of 4 bytes per mesh dimension (see max_over_meshes) and per mesh
  // dimension of `stages`; none for plain parameters without `stages`, for which each rank decides alone.
  // Throws std::invalid_argument, alike on every rank, when it was called for this optimizer since the last update(),
  // on a plain gradient that is sparse, and on gradients of float16, in which small numbers would vanish again: keep
  // parameters in float32 and use autocast. With `stages` wrong gradients fail the job, since the other stages may have
  // none.
  void unscale_(torch::optim::Optimizer& optimizer);
  void unscale_(FusedAdamW& optimizer);

  // Calls optimizer.step() if all gradients are finite on every rank, and returns whether it did, the same on every
  // rank. Calls unscale_ before, unless that was done. Throws as unscale_, and std::invalid_argument when it was called
  // for this optimizer since the last update().
  bool step(torch::optim::Optimizer& optimizer);
  bool step(FusedAdamW& optimizer);

  // Changes the scale after the steps of all optimizers, to kMinScale at least. Does not communicate. Throws
  // std::invalid_argument when no gradients were looked at since the last call.
  void update();

  LossScalerState state() const { return state_; }
  // Throws std::invalid_argument on a scale that is infinite or below kMinScale, and a negative number of steps.
  void set_state(const LossScalerState& state);

 private:
  struct Progress {
    bool all_finite = true;
    bool stepped = false;
  };

  // An optimizer goes by its address.
  void unscale(const void* optimizer, const std::vector<at::Tensor>& parameters);
  // Says whether the optimizer, whose gradients were scaled back, makes its step now.
  bool begins_step(const void* optimizer);

  LossScalerOptions options_;
  LossScalerState state_;
  std::map<const void*, Progress> progress_;  // since the last update()
};

}  // namespace tessera
