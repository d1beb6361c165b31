#include "tessera/layers/activation_checkpoint.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/layers/rng_tracker.h"
#include "tessera/layers/tensor_chunks.h"
#include "tessera/styles/compute_dtype.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

constexpr std::string_view kCapturesResult =
    "checkpoint: the function captures a tensor that other operators have computed";

// The random state of everything that `function` may draw numbers from.
class Generators {
 public:
  Generators() = default;
  explicit Generators(const tensor_list& inputs) {
    remember(c10::kCPU);
    for (const at::Tensor& each : inputs) {
      if (each.defined() && each.is_cuda()) remember(each.device());
    }
  }
  // Adds the Worlds that were drawn from, as they were before.
  void remember(const detail::DrawLog& log) { worlds_ = log.entries(); }

  // Returns the present state of the same generators and worlds.
  Generators now() const {
    Generators out;
    for (const auto& [device, state] : devices_) out.remember(device);
    for (const auto& [world, state] : worlds_) out.worlds_.push_back({world, world->random_state()});
    return out;
  }

  void restore() const {
    for (const auto& [device, states] : devices_) {
      rng_tracker(device).set_position(states.streams);
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard lock(generator.mutex());
      generator.set_state(states.generator);
    }
    for (const auto& [world, state] : worlds_) world->random_state() = state;
  }

 private:
  struct States {
    at::Tensor generator;
    RngStatesTracker::Position streams;
  };
  void remember(c10::Device device) {
    const bool known = std::ranges::any_of(devices_, [&](const auto& each) { return each.first == device; });
    if (known) return;
    RngStatesTracker::Position streams =
        rng_tracker(device).position();  // not within the lock below: position() takes that lock itself
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    devices_.emplace_back(device, States{.generator = generator.get_state(), .streams = std::move(streams)});
  }

  std::vector<std::pair<c10::Device, States>> devices_;
  std::vector<detail::DrawLog::Entry> worlds_;
};

// Sets the random state to `then` while it lives, and restores the previous state.
class Rewound {
 public:
  explicit Rewound(const Generators& then) : now_(then.now()) { then.restore(); }
  ~Rewound() { now_.restore(); }
  Rewound(const Rewound&) = delete;
  Rewound& operator=(const Rewound&) = delete;

 private:
  const Generators now_;
};

// Keeps what backward needs besides the inputs.
struct Plan {
  CheckpointFunction function;
  CheckpointOptions options;
  Generators generators;
  detail::AutocastSettings autocast;
  bool implicit_replication = false;
  std::vector<std::size_t> places;   // positions of the defined inputs; autograd is given only these
  std::size_t count = 0;             // the number of all inputs
  std::vector<int64_t> first_sizes;  // sizes of the first input, where it is distributed
};

// Returns the arguments of the function: the defined inputs, and undefined tensors at the other positions.
tensor_list all_inputs(const tensor_list& defined, const Plan& plan) {
  tensor_list out(plan.count);
  for (std::size_t k = 0; k < defined.size(); ++k) out[plan.places[k]] = defined[k];
  return out;
}

// Returns new leaves with the defined inputs' values and requires_grad, for a graph of their own.
tensor_list inputs_again(AutogradContext* ctx, const Plan& plan) {
  tensor_list inputs = ctx->get_saved_variables();
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    const bool cut = k == 0 && plan.options.distribute_saved_activations;
    inputs[k] = cut ? gather_split_1d_tensor(inputs[k], *plan.options.mesh).view(plan.first_sizes) : inputs[k].detach();
    inputs[k].requires_grad_(ctx->needs_input_grad(k));
  }
  return inputs;
}

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  // `marker` requires grad, so that backward runs, and tensors that `function` captures get gradients, even where no
  // input requires one.
  static tensor_list forward(AutogradContext* ctx, at::TensorList inputs, const at::Tensor& /*marker*/,
                             const Plan& plan) {
    Plan& kept = detail::saved<Plan>(ctx, "plan") = plan;
    tensor_list saved = inputs.vec();
    if (plan.options.distribute_saved_activations) {
      saved[0] = split_into_1d_equal_chunks(saved[0], *plan.options.mesh, /*new_buffer=*/true);
    }
    ctx->save_for_backward(saved);
    ctx->set_materialize_grads(false);
    const detail::DrawLog draws;
    tensor_list results = plan.function(all_inputs(inputs.vec(), plan));
    kept.generators.remember(draws);
    // Autograd makes every returned tensor a result of this node. A tensor that `function` captures and returns must
    // not become one.
    for (at::Tensor& each : results) {
      const bool is_input = std::ranges::any_of(inputs, [&](const at::Tensor& input) { return input.is_same(each); });
      if (each.defined() && !is_input) each = each.detach();
    }
    return results;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw std::runtime_error(
          "checkpoint: it is not compatible with torch::autograd::grad, nor with backward of chosen inputs, since "
          "gradients of tensors that the function captures are added to their .grad; call backward() without inputs");
    }
    if (c10::GradMode::is_enabled()) {
      throw std::runtime_error(
          "checkpoint: backward with create_graph is not possible, since the second computation leaves no graph; call "
          "the function without checkpoint");
    }
    const Plan& plan = detail::saved<Plan>(ctx, "plan");
    const tensor_list inputs = inputs_again(ctx, plan);
    {
      const Rewound generators(plan.generators);
      const c10::AutoGradMode recording(true);
      tensor_list results;
      {
        const detail::WithAutocast autocast(plan.autocast);
        const ImplicitReplication mode(plan.implicit_replication);
        results = plan.function(all_inputs(inputs, plan));
      }
      backward_of(results, grads);
    }
    tensor_list out;
    for (const at::Tensor& each : inputs) out.push_back(each.grad());
    out.resize(out.size() + 2);
    return out;
  }

  static void backward_of(const tensor_list& results, const tensor_list& grads) {
    if (results.size() != grads.size()) {
      throw std::runtime_error(
          fmt::format("checkpoint: the function gave {} results, and {} when it was computed again; it must give the "
                      "same number each time",
                      grads.size(), results.size()));
    }
    tensor_list roots, root_grads;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (!grads[i].defined() || !results[i].defined() || !results[i].requires_grad()) continue;
      roots.push_back(results[i]);
      root_grads.push_back(grads[i]);
    }
    if (roots.empty()) return;
    detail::NestedBackward part_of_this_pass;
    try {
      torch::autograd::backward(roots, root_grads);
    } catch (const std::exception& error) {
      const std::string_view text = error.what();
      if (text.find("backward through the graph a second time") == std::string_view::npos ||
          text.starts_with(kCapturesResult)) {
        throw;
      }
      throw std::runtime_error(fmt::format(
          "{}, such as an encoder's output, and backward has freed their graph before. Pass it to checkpoint "
          "as an input, so that its gradients are added up first, or detach() it if it comes from an earlier "
          "step; only tensors without a graph, such as parameters, may be captured. LibTorch says: {}",
          kCapturesResult, text));
    }
    part_of_this_pass.finish();
  }
};

void check(const tensor_list& inputs, const CheckpointOptions& options) {
  if (!options.distribute_saved_activations) return;
  if (!options.mesh)
    throw std::invalid_argument("checkpoint: distribute_saved_activations without a mesh; give options.mesh");
  if (inputs.empty() || !inputs[0].defined() || is_dtensor(inputs[0])) {
    throw std::invalid_argument(
        fmt::format("checkpoint: the first input is {}; distribute_saved_activations splits a plain tensor that is the "
                    "same on all ranks; give one, or leave the option out",
                    inputs.empty()        ? "not there"
                    : inputs[0].defined() ? "a DTensor, which is cut by its placements"
                                          : "undefined"));
  }
  split_into_1d_equal_chunks(inputs[0], *options.mesh);  // throws where the input cannot be split
}

}  // namespace

std::vector<at::Tensor> checkpoint(const CheckpointFunction& function, const std::vector<at::Tensor>& inputs,
                                   const CheckpointOptions& options) {
  check(inputs, options);
  // Tensors that the function captures may have tangents too, and a custom autograd function would drop them.
  if (!c10::GradMode::is_enabled() || detail::in_forward_mode()) return function(inputs);
  Plan plan{.function = function,
            .options = options,
            .generators = Generators(inputs),
            .autocast = detail::autocast_settings(),
            .implicit_replication = ImplicitReplication::enabled(),
            .places = {},
            .count = inputs.size(),
            .first_sizes = {}};
  tensor_list defined;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    defined.push_back(inputs[i]);
    plan.places.push_back(i);
  }
  if (options.distribute_saved_activations) plan.first_sizes = inputs[0].sizes().vec();
  return Checkpoint::apply(at::TensorList(defined), at::zeros({0}).requires_grad_(), plan);
}

}  // namespace tessera
