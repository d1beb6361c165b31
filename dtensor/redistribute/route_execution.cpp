#include "tessera/dtensor/redistribute/route_execution.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/failing.h"

namespace tessera {
namespace {

// Returns the name that `Checked` gives the collective of `count` transfers, of which the first is `step`.
std::string named(const PlanStep& step, std::size_t count) {
  const std::string text = fmt::format("{} -> {}", to_string(step.from), to_string(step.to));
  return count == 1 ? text : fmt::format("{}, {} together", text, count);
}

}  // namespace

RouteExecution::RouteExecution(const DeviceMesh& mesh, Items items, WaitTime wait_time) : mesh_(&mesh) {
  for (Item& item : items) {
    progress_.push_back({.route = item.route,
                         .given = item.piece,
                         .piece = item.piece,
                         .owned = item.owned,
                         .may_share = item.may_share});
    item.piece.reset();
  }
  begin_round(wait_time);
}

// Brings every item to its next transfer, and starts these.
void RouteExecution::begin_round(WaitTime wait_time) {
  struct Joined {
    TransferBatch::Entries entries;
    c10::SmallVector<std::size_t, 1> items;
  };
  c10::SmallVector<Joined, 1> round;
  for (std::size_t i = 0; i < progress_.size(); ++i) {
    Progress& at = progress_[i];
    at.piece = at.route->run_local_steps(*mesh_, at.step, std::move(at.piece));
    const Transfer* const transfer = at.route->transfer(at.step);
    if (transfer == nullptr) continue;
    at::Tensor input =
        failing(mesh_->world(), "forming what a collective sends", [&] { return transfer->input_of(at.piece); });
    const bool owned = at.owned || !at.given.defined() || !input.is_alias_of(at.given);
    TransferBatch::Entry entry{
        .transfer = transfer, .tensor = std::move(input), .owned = owned, .may_share = at.may_share};
    at.piece.reset();
    auto found = std::find_if(round.begin(), round.end(), [&](const Joined& others) {
      return TransferBatch::can_share(others.entries.front(), entry);
    });
    if (found == round.end()) {
      round.emplace_back();
      found = std::prev(round.end());
    }
    found->entries.push_back(std::move(entry));
    found->items.push_back(i);
  }
  CheckState& checks = mesh_->world().check_state();
  for (Joined& each : round) {
    const Progress& first = progress_[each.items.front()];
    if (each.items.size() > 1) {  // the batch packs them, and holds them until then
      for (const std::size_t i : each.items) progress_[i].given.reset();
    }
    const CheckedStep step(
        checks, checks.enabled ? named(first.route->plan().steps()[first.step], each.items.size()) : std::string());
    batches_.push_back({TransferBatch(*mesh_, std::move(each.entries), wait_time), std::move(each.items)});
  }
}

void RouteExecution::end_round() {
  for (Batch& batch : batches_) {
    auto pieces = batch.transfers.wait();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      Progress& at = progress_[batch.items[i]];
      at.piece = std::move(pieces[i]);
      ++at.step;
    }
  }
  batches_.clear();
}

void RouteExecution::finish() {
  while (!batches_.empty()) {
    end_round();
    begin_round(WaitTime::kAtOnce);
  }
}

at::Tensor run_route(const Route& route, const DeviceMesh& mesh, const at::Tensor& local, bool owned) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!route.communicates()) {
    std::size_t step = 0;
    return route.run_local_steps(mesh, step, local);
  }
  const World::Exclusive exclusive(mesh.world());
  RouteExecution execution(mesh, {{.route = &route, .piece = local, .owned = owned}}, WaitTime::kAtOnce);
  execution.finish();
  return std::move(execution.piece(0));
}

at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to) {
  return run_route(*route_between(from, to), from.mesh, local);
}

}  // namespace tessera
