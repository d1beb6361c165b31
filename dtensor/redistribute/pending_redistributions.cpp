#include "tessera/dtensor/redistribute/pending_redistributions.h"

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

PendingRedistributions::PendingRedistributions(const DeviceMesh& mesh, std::vector<Item> items)
    : mesh_(mesh),
      op_(mesh.world().current_op()),
      path_(mesh.world().current_path()),
      inference_(c10::InferenceMode::is_enabled()) {
  for (Item& item : items) {
    given_.push_back(item.piece);
    progress_.push_back({.route = std::move(item.route), .piece = std::move(item.piece)});
  }
  begin_round();
}

void PendingRedistributions::watch(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;  // its writes are not counted
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  watched_.push_back({.version = version, .seen = version.current_version(), .text = tensor.toString()});
}

// Advances every item to its next transfer, and starts these transfers.
void PendingRedistributions::begin_round() {
  std::vector<std::vector<TransferBatch::Entry>> entries;
  for (std::size_t i = 0; i < progress_.size(); ++i) {
    Progress& at = progress_[i];
    at.piece = at.route->walk(mesh_, at.step, at.piece);
    const Transfer* const transfer = at.route->transfer(at.step);
    if (transfer == nullptr) continue;
    const at::Tensor input = transfer->input_of(at.piece);
    TransferBatch::Entry entry{.transfer = transfer, .tensor = input, .owned = !input.is_alias_of(given_[i])};
    at.piece.reset();
    const auto fits = [&](const auto& others) { return TransferBatch::together(others.front(), entry); };
    const auto found = std::ranges::find_if(entries, fits) - entries.begin();
    if (found == std::ssize(entries)) {
      entries.emplace_back();
      batch_items_.emplace_back();
    }
    entries[static_cast<std::size_t>(found)].push_back(std::move(entry));
    batch_items_[static_cast<std::size_t>(found)].push_back(i);
  }
  CheckState& checks = mesh_.world().check_state();
  for (std::size_t k = 0; k < entries.size(); ++k) {
    const Progress& first = progress_[batch_items_[k].front()];
    const PlanStep& step = first.route->plan().steps()[first.step];
    const CheckedStep named(checks, checks.enabled ? fmt::format("{} -> {}, {} together", to_string(step.from),
                                                                 to_string(step.to), entries[k].size())
                                                   : "");
    batches_.emplace_back(mesh_, std::move(entries[k]));
  }
}

void PendingRedistributions::end_round() {
  for (std::size_t k = 0; k < batches_.size(); ++k) {
    const std::vector<at::Tensor> pieces = batches_[k].wait();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      Progress& at = progress_[batch_items_[k][i]];
      at.piece = pieces[i];
      ++at.step;
    }
  }
  batches_.clear();
  batch_items_.clear();
}

void PendingRedistributions::finish() {
  const c10::InferenceMode mode(inference_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const World::Scope scope(mesh_.world(), op_.c_str(), &path_);
  while (!batches_.empty()) {
    end_round();
    begin_round();
  }
  for (std::size_t i = 0; i < progress_.size(); ++i) {
    at::Tensor& piece = progress_[i].piece;
    piece = unaliased(piece, given_[i]);
  }
  given_.clear();
  check_unwritten();
}

void PendingRedistributions::check_unwritten() const {
  for (const WatchedVersion& each : watched_) {
    if (each.version.current_version() == each.seen) continue;
    throw std::runtime_error(fmt::format(
        "redistribute: the {} was written while it was being sent, so the result may be either value; read an "
        "asynchronous result before writing its source, or give a clone",
        each.text));
  }
}

void PendingRedistributions::deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& awaited) {
  const std::lock_guard lock(mutex_);
  if (!awaited) return;
  if (error_) std::rethrow_exception(error_);
  const World::Exclusive exclusive(
      mesh_.world());  // throws here, before anything has happened, if another thread communicates
  const detail::NotRecording own_tensors;
  try {
    if (!finished_) finish();
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  finished_ = true;
  piece = std::move(progress_[i].piece);
  awaited = false;
}

}  // namespace tessera
