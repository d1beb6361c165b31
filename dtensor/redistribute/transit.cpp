#include "tessera/dtensor/redistribute/transit.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/reused_memory.h"

namespace tessera {

Transit::Transit(const DeviceMesh& mesh, std::vector<Item> items)
    : mesh_(mesh),
      op_(mesh.world().current_op()),
      path_(mesh.world().current_path()),
      inference_(c10::InferenceMode::is_enabled()) {
  for (Item& item : items) {
    given_.push_back(item.piece);
    travellers_.push_back({.route = std::move(item.route), .piece = std::move(item.piece)});
  }
  begin_round();
}

void Transit::watch(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;  // nobody counts what is written to it
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  watched_.push_back({.version = version, .seen = version.current_version(), .text = tensor.toString()});
}

// Takes every traveller to its next transfer, and begins these.
void Transit::begin_round() {
  std::vector<std::vector<Shipment::Load>> loads;
  for (std::size_t i = 0; i < travellers_.size(); ++i) {
    Traveller& at = travellers_[i];
    at.piece = at.route->walk(mesh_, at.step, at.piece);
    const Transfer* const transfer = at.route->transfer(at.step);
    if (transfer == nullptr) continue;
    const at::Tensor loaded = transfer->loaded(at.piece);
    Shipment::Load load{.transfer = transfer, .tensor = loaded, .owned = !loaded.is_alias_of(given_[i])};
    at.piece.reset();
    const auto fits = [&](const auto& others) { return Shipment::together(others.front(), load); };
    const auto found = std::ranges::find_if(loads, fits) - loads.begin();
    if (found == std::ssize(loads)) {
      loads.emplace_back();
      aboard_.emplace_back();
    }
    loads[static_cast<std::size_t>(found)].push_back(std::move(load));
    aboard_[static_cast<std::size_t>(found)].push_back(i);
  }
  CheckState& checks = mesh_.world().check_state();
  for (std::size_t k = 0; k < loads.size(); ++k) {
    const Traveller& first = travellers_[aboard_[k].front()];
    const PlanStep& step = first.route->plan().steps()[first.step];
    const CheckedStep named(checks, checks.enabled ? fmt::format("{} -> {}, {} together", to_string(step.from),
                                                                 to_string(step.to), loads[k].size())
                                                   : "");
    shipments_.emplace_back(mesh_, std::move(loads[k]));
  }
}

void Transit::end_round() {
  for (std::size_t k = 0; k < shipments_.size(); ++k) {
    const std::vector<at::Tensor> pieces = shipments_[k].arrive();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      Traveller& at = travellers_[aboard_[k][i]];
      at.piece = pieces[i];
      ++at.step;
    }
  }
  shipments_.clear();
  aboard_.clear();
}

void Transit::finish() {
  const c10::InferenceMode mode(inference_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const World::Scope scope(mesh_.world(), op_.c_str(), &path_);
  while (!shipments_.empty()) {
    end_round();
    begin_round();
  }
  for (std::size_t i = 0; i < travellers_.size(); ++i) {
    at::Tensor& piece = travellers_[i].piece;
    piece = unaliased(piece, given_[i]);
  }
  given_.clear();
  check_unwritten();
}

void Transit::check_unwritten() const {
  for (const Written& each : watched_) {
    if (each.version.current_version() == each.seen) continue;
    throw std::runtime_error(fmt::format(
        "redistribute: the {} was written while it was being sent, so what has come may be either value; read an "
        "asynchronous result before writing its source, or give a clone",
        each.text));
  }
}

void Transit::deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& awaited) {
  const std::lock_guard lock(mutex_);
  if (!awaited) return;
  if (error_) std::rethrow_exception(error_);
  const World::Exclusive exclusive(mesh_.world());  // or nothing has happened yet
  const detail::NotRecording own_tensors;
  try {
    if (!finished_) finish();
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  finished_ = true;
  piece = std::move(travellers_[i].piece);
  awaited = false;
}

}  // namespace tessera
