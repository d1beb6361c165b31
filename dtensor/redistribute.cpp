#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include "tessera/dtensor/backward_node.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/core/wrapper.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute/async_redistributions.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/dtensor/redistribute_result.h"
#include "tessera/dtensor/redistribution.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/reused_memory.h"
#include "tessera/mesh/failing.h"

namespace tessera {
namespace {

using torch::autograd::tensor_list;

// Says what a result may do with the memory of the tensor that is redistributed.
enum class Memory {
  kApart,  // nothing: each of the two may be written without the other
  kTake,   // nobody reads the tensor later, so its piece may be reduced in place and become the result's
  kShare,  // where nothing moves it may be a view: nobody writes the result
};

// Describes one call of redistribute or redistribute_many.
struct RedistributeCall {
  std::vector<Redistribution> redistributions;
  RedistributeOptions options;
  Memory memory = Memory::kApart;

  bool takes() const { return memory == Memory::kTake; }

  const DeviceMesh& mesh() const { return redistributions[0].from->mesh; }
};

at::Tensor run_one(const at::Tensor& dtensor, const Redistribution& redistribution, const CostModel& model,
                   Memory memory) {
  const DeviceMesh& mesh = redistribution.from->mesh;
  const at::Tensor& local = detail::meta(dtensor).local();
  const bool takes = memory == Memory::kTake;
  const at::Tensor sent = redistribution.as_sent(local);
  const bool owned = takes || !sent.is_same(local);
  const RoutePtr route = redistribution.route(model);
  const at::Tensor moved = run_route(*route, mesh, sent, owned);
  // By the plan and the strides, which are the same on every rank: by its piece one would have a view and another a
  // copy. A piece that is not dense is copied nevertheless.
  const bool stays = route->plan().steps().empty() && redistribution.from->strides == redistribution.to->strides;
  if (memory == Memory::kShare && stays && moved.is_alias_of(local) && moved.is_contiguous())
    return detail::wrap_view(moved, redistribution.to, dtensor, 0);
  at::Tensor piece = failing(mesh.world(), "redistribute", [&] { return unaliased(moved, sent, owned); });
  return detail::wrap(std::move(piece), redistribution.to);
}

// Says whether the call's results wait until they are read. On a GPU they do also where nothing is sent: the stream
// that reads one may have to wait for the stream that computes it.
bool pends(const RedistributeCall& call, bool communicates) {
  const bool has_streams = !call.mesh().device().is_cpu() && !call.mesh().world().is_fake();
  return call.options.async && (communicates || has_streams);
}

tensor_list run_batch(at::TensorList dtensors, const RedistributeCall& call) {
  std::vector<AsyncRedistributions::Item> items;
  bool communicates = false;
  for (std::size_t i = 0; i < dtensors.size(); ++i) {
    const Redistribution& redistribution = call.redistributions[i];
    const at::Tensor& local = detail::meta(dtensors[i]).local();
    at::Tensor sent = redistribution.as_sent(local);
    // Writes to an inference tensor are not counted, so a copy of it is sent.
    if (call.options.async && local.is_inference() && sent.is_same(local)) {
      sent = failing(call.mesh().world(), "redistribute", [&] { return reused_copy(local); });
    }
    const bool owned = call.takes() || !sent.is_same(local);
    items.push_back({redistribution.route(call.options.cost_model), std::move(sent), owned});
    communicates |= items.back().route->communicates();
  }
  // Where this call is synchronous, the results are read below.
  const WaitTime wait_time = call.options.async ? WaitTime::kLater : WaitTime::kAtOnce;
  const auto running = std::make_shared<AsyncRedistributions>(call.mesh(), std::move(items), wait_time);
  tensor_list out;
  for (std::size_t i = 0; i < dtensors.size(); ++i) out.push_back(detail::wrap(running, i, call.redistributions[i].to));
  if (!pends(call, communicates)) {
    for (const at::Tensor& each : out) detail::meta(each).local();
  } else if (!call.takes()) {
    for (const at::Tensor& each : dtensors) running->forbid_writes(each);
  }
  return out;
}

// Counts the collectives under "redistribute" and under the path of the tensor's contract, unless a scope around the
// call gives a name.
class RedistributeScope {
 public:
  explicit RedistributeScope(const at::Tensor& dtensor) {
    World& world = mesh_of(dtensor).world();
    if (*world.current_op() != '\0') return;
    const ContractPtr& contract = detail::meta(dtensor).contract;
    scope_.emplace(world, "redistribute", contract ? &contract->path : nullptr);
  }

 private:
  std::optional<World::Scope> scope_;
};

tensor_list run_all(at::TensorList dtensors, const RedistributeCall& call) {
  const RedistributeScope scope(dtensors[0]);
  const Redistribution& first = call.redistributions[0];
  const CostModel& model = call.options.cost_model;
  const bool alone = dtensors.size() == 1;
  if (alone && (!call.options.async || !pends(call, first.route(model)->communicates())))
    return {run_one(dtensors[0], first, model, call.memory)};
  return run_batch(dtensors, call);
}

// Says whether `dtensor` is the caller's alone: no other tensor, view or saved tensor shares its piece's memory.
bool held_once(const at::Tensor& dtensor) {
  if (!is_dtensor(dtensor) || dtensor.use_count() != 1) return false;
  const at::Tensor& local = detail::meta(dtensor).local();  // waits for a pending piece
  return local.has_storage() && !detail::shares_memory(dtensor);
}

bool is_recorded(at::TensorList dtensors) {
  return c10::GradMode::is_enabled() &&
         std::ranges::any_of(dtensors, [](const at::Tensor& t) { return t.requires_grad(); });
}

void check_many(const std::vector<at::Tensor>& dtensors, const std::vector<Placements>& placements);
std::vector<at::Tensor> redistribute_each(const std::vector<at::Tensor>& dtensors,
                                          const std::vector<Placements>& placements, const RedistributeOptions& options,
                                          Memory memory);

// Redistributes the gradients of a redistribution's results back.
struct RedistributeFormula {
  static constexpr const char* kName = "tessera::redistribute";
  RedistributeCall call;

  tensor_list operator()(const torch::autograd::Node& node, const tensor_list& /*saved*/, tensor_list& grads) const {
    tensor_list moving;
    std::vector<Placements> wanted;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      const at::Tensor gradient = std::exchange(grads[i], at::Tensor());
      if (!gradient.defined() || !node.task_should_compute_output(i)) continue;
      places.push_back(i);
      const Spec& input = *call.redistributions[i].from;
      moving.push_back(detail::as_dtensor(gradient, input).to(call.options.backward_dtype.value_or(input.dtype)));
      wanted.push_back(
          call.redistributions[i].gradient.value_or(default_gradient(input, placements_of(moving.back()))));
    }
    tensor_list out(grads.size());
    if (moving.empty()) return out;
    check_many(moving, wanted);
    // Often nobody but this call holds a gradient that autograd passes on.
    const bool takes = !c10::GradMode::is_enabled() && std::ranges::all_of(moving, held_once);
    const tensor_list moved =
        redistribute_each(moving, wanted, {.async = call.options.async, .cost_model = call.options.cost_model},
                          takes ? Memory::kTake : Memory::kApart);
    for (std::size_t k = 0; k < places.size(); ++k) {
      out[places[k]] = moved[k].to(call.redistributions[places[k]].from->dtype);
    }
    return out;
  }
};

// Records the redistributions of those tensors that require a gradient; the results of the others have none.
tensor_list record_values(at::TensorList dtensors, const RedistributeCall& call) {
  RedistributeCall recorded{.redistributions = {}, .options = call.options, .memory = call.memory};
  c10::SmallVector<at::Tensor, 1> inputs;
  c10::SmallVector<std::size_t, 1> places;
  for (std::size_t i = 0; i < dtensors.size(); ++i) {
    if (!dtensors[i].requires_grad()) continue;
    recorded.redistributions.push_back(call.redistributions[i]);
    inputs.push_back(dtensors[i]);
    places.push_back(i);
  }
  tensor_list out;
  detail::record(inputs, {}, RedistributeFormula{std::move(recorded)}, [&] {
    out = run_all(dtensors, call);
    c10::SmallVector<at::Tensor, 1> results;
    for (const std::size_t i : places) results.push_back(out[i]);
    return results;
  });
  return out;
}

// Skips autograd when it has nothing to record, since it costs as much as the rest.
tensor_list move_values(at::TensorList dtensors, const RedistributeCall& call) {
  if (is_recorded(dtensors)) return record_values(dtensors, call);
  const c10::AutoGradMode no_gradient(false);
  return run_all(dtensors, call);
}

// Redistributes the tangents to the layouts of their tensors too.
tensor_list move_all(at::TensorList dtensors, const RedistributeCall& call) {
  if (std::ranges::none_of(dtensors, [](const at::Tensor& t) { return detail::has_tangent(t); })) {
    return move_values(dtensors, call);
  }
  tensor_list primals;
  for (std::size_t i = 0; i < dtensors.size(); ++i) {
    primals.push_back(detail::primal_of(dtensors[i]));
    if (!detail::has_tangent(dtensors[i])) continue;
    detail::refuse_nonlinear("redistribute", *call.redistributions[i].from);
    detail::refuse_nonlinear("redistribute", *call.redistributions[i].to);
  }
  tensor_list out = move_values(primals, call);
  for (std::size_t i = 0; i < dtensors.size(); ++i) {
    if (!detail::has_tangent(dtensors[i])) continue;
    const Spec& to = *call.redistributions[i].to;
    const at::Tensor given = detail::tangent_of(dtensors[i]);
    at::Tensor tangent =
        redistribute(given, to.placements, {.forward_dtype = to.dtype, .cost_model = call.options.cost_model});
    // A tangent that has the result's layout already would be shared by both tensors, and written with either.
    if (tangent.is_same(given) && call.memory != Memory::kShare) tangent = tangent.clone();
    out[i] = detail::with_tangent(out[i], tangent);
  }
  return out;
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
        fmt::format("redistribute_many: tensor {} is on mesh {}, tensor 0 on {}; call it once for each mesh", i,
                    mesh.to_string(), first.to_string()));
  }
}

std::vector<at::Tensor> redistribute_each(const std::vector<at::Tensor>& dtensors,
                                          const std::vector<Placements>& placements, const RedistributeOptions& options,
                                          Memory memory) {
  std::vector<at::Tensor> out = dtensors;
  RedistributeCall call{.redistributions = {}, .options = options, .memory = memory};
  tensor_list moving;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < dtensors.size(); ++i) {
    std::optional<Redistribution> redistribution = redistribution_of(dtensors[i], placements[i], options);
    if (!redistribution) continue;
    call.redistributions.push_back(*std::move(redistribution));
    moving.push_back(dtensors[i]);
    places.push_back(i);
  }
  if (moving.empty()) return out;
  for (const at::Tensor& each : moving) detail::watch_gradient(each);
  const tensor_list moved = move_all(moving, call);
  for (std::size_t k = 0; k < places.size(); ++k) out[places[k]] = moved[k];
  return out;
}

at::Tensor redistribute_one(const at::Tensor& dtensor, const Placements& placements, const RedistributeOptions& options,
                            Memory memory) {
  if (options.async || is_recorded(dtensor) || (is_dtensor(dtensor) && detail::has_tangent(dtensor))) {
    return redistribute_each({dtensor}, {placements}, options, memory)[0];
  }
  const std::optional<Redistribution> redistribution = redistribution_of(dtensor, placements, options);
  if (!redistribution) return dtensor;
  detail::watch_gradient(dtensor);
  const c10::AutoGradMode no_gradient(false);
  const RedistributeScope scope(dtensor);
  return run_one(dtensor, *redistribution, options.cost_model, memory);
}

// Returns what redistribute_shared has made of `dtensor` at this place of autograd's graph, or an undefined tensor. The
// aliases that detach() makes share a Meta, but not this place.
at::Tensor shared_before(const at::Tensor& dtensor, const Placements& placements) {
  const detail::Meta& meta = detail::meta(dtensor);
  if (!meta.shared || meta.shared->writes != meta.writes()) return {};
  const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> held = meta.shared->result.lock();
  if (!held.defined()) return {};
  const at::Tensor result(held);
  if (placements_of(result) != placements || result.grad_fn() == nullptr) return {};
  const torch::autograd::edge_list& from = result.grad_fn()->next_edges();
  return from.size() == 1 && from[0] == torch::autograd::impl::gradient_edge(dtensor) ? result : at::Tensor();
}

}  // namespace

std::vector<at::Tensor> redistribute_many(const std::vector<at::Tensor>& dtensors,
                                          const std::vector<Placements>& placements,
                                          const RedistributeOptions& options) {
  const detail::NotDeferred own_tensors;
  check_many(dtensors, placements);
  return redistribute_each(dtensors, placements, options, Memory::kApart);
}

at::Tensor redistribute(const at::Tensor& dtensor, const Placements& placements, const RedistributeOptions& options) {
  const detail::NotDeferred own_tensors;
  return redistribute_one(dtensor, placements, options, Memory::kApart);
}

at::Tensor detail::redistribute_result(const at::Tensor& dtensor, const Placements& placements,
                                       const RedistributeOptions& options) {
  const NotDeferred own_tensors;
  return redistribute_one(dtensor, placements, options, held_once(dtensor) ? Memory::kTake : Memory::kApart);
}

at::Tensor detail::redistribute_to_read(const at::Tensor& dtensor, const Placements& placements,
                                        const RedistributeOptions& options) {
  const NotDeferred own_tensors;
  return redistribute_one(dtensor, placements, options, Memory::kShare);
}

at::Tensor detail::redistribute_shared(const at::Tensor& dtensor, const Placements& placements) {
  if (!is_recorded(dtensor) || has_tangent(dtensor)) return redistribute_to_read(dtensor, placements);
  check_current(dtensor, "redistribute");
  const Placements to = normalize(placements, mesh_of(dtensor).mesh(), dtensor.dim(), "redistribute");
  if (at::Tensor there = shared_before(dtensor, to); there.defined()) return there;
  at::Tensor result = redistribute_to_read(dtensor, to);
  Meta& of = meta(dtensor);
  if (!result.is_same(dtensor)) {
    of.shared = SharedRedistribution{
        .result = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(result.getIntrusivePtr()),
        .writes = of.writes()};
  }
  return result;
}

}  // namespace tessera
