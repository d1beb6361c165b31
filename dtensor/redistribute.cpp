#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/transit.h"
#include "tessera/dtensor/saved.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/reused_memory.h"
#include "tessera/placement/plan.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Where a tensor comes from and goes to.
struct Way {
  SpecPtr from;
  SpecPtr to;                          // the piece is row-major there, and so is the global tensor
  std::optional<Placements> gradient;  // where the caller said

  RoutePtr route(const CostModel& model) const {
    // What travels has the result's dtype.
    if (from->dtype == to->dtype) return route_between(*from, to->placements, model);
    return route_between(*intern_spec(from->mesh, from->placements, from->sizes, from->strides, to->dtype), to->placements,
                         model);
  }
};

// One call.
struct Journey {
  std::vector<Way> ways;
  RedistributeOptions options;

  const DeviceMesh& mesh() const { return ways[0].from->mesh; }
};

at::Tensor carry(const at::Tensor& dtensor, const Way& way, const CostModel& model) {
  const at::Tensor& local = detail::meta(dtensor).local();
  const bool same = way.from->dtype == way.to->dtype;
  const at::Tensor moved = way.route(model)->run(way.from->mesh, same ? local : local.to(way.to->dtype));
  return detail::wrap(unaliased(moved, local), way.to);
}

tensor_list carry_together(at::TensorList dtensors, const Journey& journey) {
  std::vector<Transit::Item> items;
  bool communicates = false;
  for (std::size_t i = 0; i < dtensors.size(); ++i) {
    const Way& way = journey.ways[i];
    items.push_back({way.route(journey.options.cost_model), detail::meta(dtensors[i]).local().to(way.to->dtype)});
    // Nobody counts what is written to an inference tensor, so what is sent later must not be it.
    at::Tensor& piece = items.back().piece;
    if (journey.options.async && piece.is_inference()) piece = reused_copy(piece);
    communicates |= items.back().route->communicates();
  }
  const auto transit = std::make_shared<Transit>(journey.mesh(), items);
  tensor_list out;
  for (std::size_t i = 0; i < dtensors.size(); ++i) out.push_back(detail::wrap(transit, i, journey.ways[i].to));
  if (journey.options.async && communicates) {
    for (std::size_t i = 0; i < dtensors.size(); ++i) {
      transit->watch(dtensors[i]);
      transit->watch(items[i].piece);
    }
  } else {
    for (const at::Tensor& each : out) detail::meta(each).local();
  }
  return out;
}

// Says whom to charge, where a contract or a gradient under way has not said it already.
class Charge {
 public:
  explicit Charge(const at::Tensor& dtensor) {
    World& world = mesh_of(dtensor).world();
    if (*world.current_op() != '\0') return;
    const ContractPtr& contract = detail::meta(dtensor).contract;
    scope_.emplace(world, "redistribute", contract ? &contract->path : nullptr);
  }

 private:
  std::optional<World::Scope> scope_;
};

tensor_list carry_all(at::TensorList dtensors, const Journey& journey) {
  const Charge charge(dtensors[0]);
  if (dtensors.size() == 1 && !journey.options.async) {
    return {carry(dtensors[0], journey.ways[0], journey.options.cost_model)};
  }
  return carry_together(dtensors, journey);
}

bool is_recorded(at::TensorList dtensors) {
  return c10::GradMode::is_enabled() && std::ranges::any_of(dtensors, [](const at::Tensor& t) { return t.requires_grad(); });
}

// Where an input's gradient goes when the caller did not say: its own layout; under a Partial, the gradient's where the two make
// one, else whole.
Placements default_gradient(const Spec& input, const Placements& gradient) {
  Placements out = input.placements;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].is_partial()) out[i] = gradient[i].is_partial() ? Replicate() : gradient[i];
  }
  return is_layout(out, input.mesh.mesh(), input.sizes) ? out : without_partial(input.placements);
}

struct Redistribute : torch::autograd::Function<Redistribute> {
  static tensor_list forward(AutogradContext* ctx, at::TensorList dtensors, const Journey& journey) {
    if (std::ranges::any_of(dtensors, [](const at::Tensor& t) { return t.requires_grad(); })) {
      detail::saved<Journey>(ctx, "journey") = journey;
      ctx->set_materialize_grads(false);  // a result that nobody used has none
    }
    return carry_all(dtensors, journey);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto& journey = detail::saved<Journey>(ctx, "journey");
    tensor_list moving;
    std::vector<Placements> wanted;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      const Spec& input = *journey.ways[i].from;
      moving.push_back(detail::as_dtensor(grads[i], input).to(journey.options.backward_dtype.value_or(input.dtype)));
      wanted.push_back(journey.ways[i].gradient.value_or(default_gradient(input, placements_of(moving.back()))));
    }
    tensor_list out(grads.size() + 1);
    if (moving.empty()) return out;
    const tensor_list moved =
        redistribute_many(moving, wanted, {.async = journey.options.async, .cost_model = journey.options.cost_model});
    for (std::size_t i = 0, next = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) out[i] = moved[next++].to(journey.ways[i].from->dtype);
    }
    return out;
  }
};

// Autograd costs as much as the rest where there is nothing for it to do.
tensor_list move_all(at::TensorList dtensors, const Journey& journey) {
  if (is_recorded(dtensors)) return Redistribute::apply(dtensors, journey);
  const c10::AutoGradMode no_gradient(false);
  return carry_all(dtensors, journey);
}

void check_dtypes(const Spec& from, at::ScalarType to, const RedistributeOptions& options, bool requires_grad) {
  const at::ScalarType back = options.backward_dtype.value_or(from.dtype);
  if (requires_grad && !(isFloatingType(to) || isComplexType(to))) {
    throw std::invalid_argument(
        fmt::format("redistribute: a tensor that requires grad as {}, which has no gradients; detach it", toString(to)));
  }
  if (requires_grad && !(isFloatingType(back) || isComplexType(back))) {
    throw std::invalid_argument(
        fmt::format("redistribute: a gradient as {}; backward_dtype must be floating", toString(back)));
  }
}

// The way of one tensor, or none where nothing changes.
std::optional<Way> way_of(const at::Tensor& dtensor, const Placements& placements, const RedistributeOptions& options) {
  const SpecPtr from = spec_ptr_of(dtensor);
  const Mesh& mesh = from->mesh.mesh();
  Way way{.from = from, .to = nullptr, .gradient = {}};
  if (options.grad_placements) {
    way.gradient = normalize(*options.grad_placements, mesh, from->ndim(), "redistribute: grad_placements");
  }
  const Placements to = normalize(placements, mesh, from->ndim(), "redistribute");
  const at::ScalarType dtype = options.forward_dtype.value_or(from->dtype);
  detail::check_current(dtensor, "redistribute");
  const bool plain = !options.grad_placements && options.backward_dtype.value_or(dtype) == dtype;
  if (to == from->placements && dtype == from->dtype && plain) return std::nullopt;
  check_dtypes(*from, dtype, options, dtensor.requires_grad());
  check_partials(from->placements, dtype, "redistribute");
  check_partials(to, dtype, "redistribute");
  check_layout(to, mesh, from->sizes, "redistribute");
  if (!options.cost_model.links.empty()) check_cost_model(options.cost_model, mesh.ndim(), "redistribute");
  way.to = intern_spec(from->mesh, to, from->sizes, dtype);
  return way;
}

void check_many(const std::vector<at::Tensor>& dtensors, const std::vector<Placements>& placements) {
  if (dtensors.size() != placements.size()) {
    throw std::invalid_argument(fmt::format("redistribute_many: {} tensors and {} placements; give one for each",
                                            dtensors.size(), placements.size()));
  }
  for (std::size_t i = 1; i < dtensors.size(); ++i) {
    const DeviceMesh& first = mesh_of(dtensors[0]);
    const DeviceMesh& mesh = mesh_of(dtensors[i]);
    if (mesh == first) continue;
    throw std::invalid_argument(
        fmt::format("redistribute_many: tensor {} lies on mesh {}, tensor 0 on {}; call it once for each mesh", i,
                    mesh.to_string(), first.to_string()));
  }
}

}  // namespace

std::vector<at::Tensor> redistribute_many(const std::vector<at::Tensor>& dtensors, const std::vector<Placements>& placements,
                                          const RedistributeOptions& options) {
  const detail::NotRecording own_tensors;
  check_many(dtensors, placements);
  std::vector<at::Tensor> out = dtensors;
  Journey journey{.ways = {}, .options = options};
  tensor_list moving;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < dtensors.size(); ++i) {
    std::optional<Way> way = way_of(dtensors[i], placements[i], options);
    if (!way) continue;
    journey.ways.push_back(*std::move(way));
    moving.push_back(dtensors[i]);
    places.push_back(i);
  }
  if (moving.empty()) return out;
  for (const at::Tensor& each : moving) detail::watch_gradient(each);
  const tensor_list moved = move_all(moving, journey);
  for (std::size_t k = 0; k < places.size(); ++k) out[places[k]] = moved[k];
  return out;
}

at::Tensor redistribute(const at::Tensor& dtensor, const Placements& placements, const RedistributeOptions& options) {
  const detail::NotRecording own_tensors;
  if (options.async || is_recorded(dtensor)) return redistribute_many({dtensor}, {placements}, options)[0];
  const std::optional<Way> way = way_of(dtensor, placements, options);
  if (!way) return dtensor;
  detail::watch_gradient(dtensor);
  const c10::AutoGradMode no_gradient(false);
  const Charge charge(dtensor);
  return carry(dtensor, *way, options.cost_model);
}

}  // namespace tessera
