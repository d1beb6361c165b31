#include "tessera/dtensor/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/fused_adamw.h"
#include "tessera/dtensor/local_gradients.h"
#include "tessera/dtensor/optimizer_parameters.h"
#include "tessera/dtensor/over_meshes.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/values_on_host.h"
#include "tessera/mesh/world.h"

namespace tessera {
namespace {

constexpr const char* kOp = "LossScaler";

bool is_scale(double value) { return value >= LossScaler::kMinScale && std::isfinite(value); }

void check_dtypes(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined() || parameter.grad().scalar_type() != at::kHalf) continue;
    throw std::invalid_argument(
        fmt::format("{}: a gradient of [{}] is float16, in which small numbers vanish when it is scaled back; keep "
                    "parameters in float32 and compute under autocast",
                    kOp, fmt::join(parameter.sizes(), ", ")));
  }
}

// Returns the tensors as real numbers in the same memory: the operator that scales back has no kernel for complex ones.
std::vector<at::Tensor> as_real(std::vector<at::Tensor> tensors) {
  for (at::Tensor& t : tensors) {
    if (t.is_complex()) t = at::view_as_real(t.is_conj() ? t.conj() : t);
  }
  return tensors;
}

// Scales the pieces in place. Returns 1 on the first device if one of them has a number that is not finite, else 0.
at::Tensor scale_back(const std::vector<detail::LocalGradient>& gradients, double scale, c10::Device device) {
  at::Tensor found = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
  for (const std::vector<at::Tensor>& group : detail::alike(gradients)) {
    const auto one = at::TensorOptions().dtype(at::kFloat).device(group.front().device());
    at::Tensor here = at::zeros({1}, one);
    at::_amp_foreach_non_finite_check_and_unscale_(as_real(group), here, at::full({1}, 1 / scale, one));
    found = at::maximum(found, here.to(device));
  }
  return found;
}

}  // namespace

LossScaler::LossScaler(LossScalerOptions options) : options_(std::move(options)), state_{options_.initial_scale, 0} {
  const auto refuse = [](const char* what, double value, const char* must) {
    throw std::invalid_argument(fmt::format("{}: {} is {}; it must be {}", kOp, what, value, must));
  };
  if (!is_scale(options_.initial_scale)) refuse("initial_scale", options_.initial_scale, "finite, and 2^-24 or more");
  if (!(options_.growth_factor > 1)) refuse("growth_factor", options_.growth_factor, "more than 1");
  if (!(options_.backoff_factor > 0 && options_.backoff_factor < 1)) {
    refuse("backoff_factor", options_.backoff_factor, "between 0 and 1");
  }
  if (options_.growth_interval < 1) {
    refuse("growth_interval", static_cast<double>(options_.growth_interval), "1 or more");
  }
}

at::Tensor LossScaler::scale(const at::Tensor& loss) const { return loss * state_.scale; }

void LossScaler::unscale_(torch::optim::Optimizer& optimizer) { unscale(&optimizer, parameters_of(optimizer)); }

void LossScaler::unscale_(FusedAdamW& optimizer) { unscale(&optimizer, optimizer.parameters()); }

void LossScaler::unscale(const void* optimizer, const std::vector<at::Tensor>& parameters) {
  if (progress_.contains(optimizer)) {
    throw std::invalid_argument(
        fmt::format("{}: the gradients of this optimizer were scaled back since the last update(); call it once", kOp));
  }
  const at::NoGradGuard no_grad;
  const detail::NotDeferred own_tensors;
  const detail::LocalGradients all = detail::on_own_stage(options_.stages, kOp, [&] {
    check_dtypes(parameters);
    return detail::local_gradients(parameters, kOp);
  });
  const c10::Device device = all.gradients.empty() ? c10::Device(c10::kCPU) : all.gradients.front().piece.device();
  at::Tensor found = max_over_meshes(scale_back(all.gradients, state_.scale, device), all.meshes, kOp);
  if (options_.stages) {
    const DeviceMesh& stages = *options_.stages;
    const World::Scope scope(stages.world(), kOp);
    for (int64_t dim = 0; dim < stages.ndim(); ++dim) {
      found = all_reduce(found.to(stages.device()), stages, dim, ReduceOp::kMax);
    }
  }
  if (const World* const world = all.world(options_.stages)) found = values_on_host(found, *world);
  progress_[optimizer].all_finite = found.item<float>() == 0;
}

bool LossScaler::step(torch::optim::Optimizer& optimizer) {
  if (!progress_.contains(&optimizer)) unscale_(optimizer);
  const bool steps = begins_step(&optimizer);
  if (steps) optimizer.step();
  return steps;
}

bool LossScaler::step(FusedAdamW& optimizer) {
  if (!progress_.contains(&optimizer)) unscale_(optimizer);
  const bool steps = begins_step(&optimizer);
  if (steps) optimizer.step();
  return steps;
}

bool LossScaler::begins_step(const void* optimizer) {
  Progress& progress = progress_.at(optimizer);
  if (progress.stepped) {
    throw std::invalid_argument(
        fmt::format("{}: step() was called for this optimizer since the last update(); call update() between", kOp));
  }
  progress.stepped = true;
  return progress.all_finite;
}

void LossScaler::update() {
  if (progress_.empty()) {
    throw std::invalid_argument(
        fmt::format("{}: update() comes after step() or unscale_(); none was called since the last one", kOp));
  }
  const bool all_finite = std::ranges::all_of(progress_, [](const auto& each) { return each.second.all_finite; });
  progress_.clear();
  if (!all_finite) {
    state_ = {std::max(state_.scale * options_.backoff_factor, kMinScale), 0};
    return;
  }
  if (++state_.good_steps < options_.growth_interval) return;
  // The loss is scaled in float32, as PyTorch does: a larger scale would be infinite there.
  const double grown = state_.scale * options_.growth_factor;
  state_ = {std::isfinite(static_cast<float>(grown)) ? grown : state_.scale, 0};
}

void LossScaler::set_state(const LossScalerState& state) {
  if (!is_scale(state.scale) || state.good_steps < 0) {
    throw std::invalid_argument(
        fmt::format("{}: the state has the scale {} and {} steps; the scale must be finite, and 2^-24 or more, the "
                    "number of steps 0 or more",
                    kOp, state.scale, state.good_steps));
  }
  state_ = state;
  progress_.clear();
}

}  // namespace tessera
