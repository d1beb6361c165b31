#include "tessera/dtensor/dispatch/gather_schedule.h"

#include <algorithm>
#include <atomic>

#include <ATen/core/LegacyTypeDispatch.h>

#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/world.h"

namespace tessera {
namespace {

// Returns the placements of the transpose of a matrix.
Placements transposed(Placements placements) {
  for (Placement& each : placements) {
    if (each.is_shard()) each = each.on(1 - each.tensor_dim());
  }
  return placements;
}

// Says whether both pieces begin at the same element of one storage, as a view and its tensor do. A clone has another.
bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset();
}

enum class ViewOf { kItself, kTranspose, kOther };

// Says what `view` is of the parameter that has this layout and this piece.
ViewOf view_of(const detail::Meta& view, const Spec& own, const at::Tensor& piece) {
  const Spec& seen = *view.spec;
  const at::Tensor& there = view.local();
  if (!same_memory(there, piece) || seen.dtype != own.dtype) return ViewOf::kOther;
  // The views conj() and _neg_view() differ from their tensor in nothing else.
  if (there.is_conj() != piece.is_conj() || there.is_neg() != piece.is_neg()) return ViewOf::kOther;
  if (seen.sizes == own.sizes && seen.strides == own.strides && seen.placements == own.placements) {
    return ViewOf::kItself;
  }
  const bool turned = own.ndim() == 2 && seen.ndim() == 2 && seen.sizes[0] == own.sizes[1] &&
                      seen.sizes[1] == own.sizes[0] && seen.strides[0] == own.strides[1] &&
                      seen.strides[1] == own.strides[0] && seen.placements == transposed(own.placements);
  return turned ? ViewOf::kTranspose : ViewOf::kOther;
}

}  // namespace

void GatherSchedule::add(const at::Tensor& parameter) {
  const detail::Meta& meta = detail::meta(parameter);
  if (meta.spec->strides != contiguous_strides(meta.spec->sizes)) return;  // pieces are gathered row by row
  by_path_.emplace(meta.contract->path, slots_.size());
  slots_.push_back({.seen = {.spec = meta.spec, .piece = meta.local(), .counters = meta.write_counters()}});
}

at::Tensor GatherSchedule::gather(const std::string& path, const detail::Meta& view, const Spec& whole) {
  const std::lock_guard lock(mutex_);
  const auto found = by_path_.find(path);
  if (found == by_path_.end()) return {};
  Slot& slot = slots_[found->second];
  Seen& seen = slot.seen;
  const ViewOf kind = view_of(view, *seen.spec, seen.piece);
  if (kind == ViewOf::kOther) return {};
  seen.counters = view.write_counters();
  slot.whole = kind == ViewOf::kTranspose ? transposed(whole.placements) : whole.placements;
  const at::Tensor piece = use(found->second);
  return kind == ViewOf::kTranspose ? piece.t() : piece;
}

void GatherSchedule::follow(const detail::Meta& parameter, const detail::Meta& next) {
  const std::lock_guard lock(mutex_);
  const auto found = by_path_.find(parameter.contract->path);
  if (found == by_path_.end()) return;
  Seen& seen = slots_[found->second].seen;
  if (&parameter == &next || view_of(parameter, *seen.spec, seen.piece) == ViewOf::kOther) return;  // a clone
  seen = {.spec = next.spec,
          .piece = next.local(),
          .counters = next.write_counters(),
          .replacements = seen.replacements + 1};
}

void GatherSchedule::Slot::mark(const at::Tensor& gathered) { made = StreamPoint::here(gathered.device()); }

// Gathers the parameter for this use. What is on its way was started outside a capture, and is waited for there.
at::Tensor GatherSchedule::use_alone(const Slot& slot, bool captured) {
  if (!captured) ahead_.reset();
  for (Slot& each : slots_) each.piece = at::Tensor();
  return redistribute_local(slot.seen.piece, *slot.seen.spec, slot.whole);
}

// Returns the gathered piece, and starts what is expected next once nothing that was gathered ahead is left.
at::Tensor GatherSchedule::use(std::size_t index) {
  Slot& slot = slots_[index];
  const bool captured = is_captured(slot.seen.piece.device());
  if (captured) unseen_writes_ = true;
  if (unseen_writes_) return use_alone(slot, captured);
  learn(index);
  const bool may_hold = slot.seen.counts_writes();
  const auto held = [&] { return may_hold && slot.piece.defined() && slot.values == slot.seen.values(); };
  // A parameter that may be held, is not, and is not on its way was not expected: what is on its way may not be needed
  // either.
  if (ahead_ && ((may_hold && !held()) || std::ranges::count(ahead_->slots, index) > 0)) wait_for_ahead();
  at::Tensor piece = held() ? slot.piece : at::Tensor();
  // Another stream may have made it, such as that of another micro-batch.
  if (piece.defined()) {
    slot.made.wait();
    slot.made.keep(piece);
  }
  if (!options_.keeps || !piece.defined()) slot.piece = at::Tensor();
  if (!piece.defined()) {
    if (may_hold) all_held_ = false;
    piece = redistribute_local(slot.seen.piece, *slot.seen.spec, slot.whole);
    slot.mark(piece);
  }
  if (options_.keeps && may_hold) {
    slot.piece = piece;
    slot.values = slot.seen.values();
  }
  start_ahead();
  return piece;
}

// Notes that this parameter came after the last four. One that was used in this step and written since begins a new
// step of the optimizer, and must not be gathered ahead before that.
void GatherSchedule::learn(std::size_t index) {
  Slot& slot = slots_[index];
  const Values values = slot.seen.values();
  if (slot.step == step_ && slot.used != values) {
    ++step_;
    drop_old_pieces();
    next_.erase(last_);
    last_ = kNothing;
    all_held_ = false;
  } else if (last_ != kNothing) {
    const auto [next, is_new] = next_.try_emplace(last_, index);
    if (is_new || next->second != index) all_held_ = false;
    next->second = index;
  }
  last_ = {last_[1], last_[2], last_[3], index};
  slot.step = step_;
  slot.used = values;
}

// Frees the pieces of parameters that were written.
void GatherSchedule::drop_old_pieces() {
  for (Slot& slot : slots_) {
    if (!slot.piece.defined()) continue;
    if (slot.values != slot.seen.values()) slot.piece = at::Tensor();
  }
}

GatherSchedule::Values GatherSchedule::Seen::values() const {
  return {.memory = piece.storage().getWeakStorageImpl(),
          .offset = piece.storage_offset(),
          .strides = at::DimVector(piece.strides()),
          .conjugate = piece.is_conj(),
          .negative = piece.is_neg(),
          .writes = counters.sum(),
          .replacements = replacements};
}

void GatherSchedule::wait_for_ahead() {
  const Ahead done = std::move(*ahead_);
  ahead_.reset();
  all_held_ = false;
  for (std::size_t i = 0; i < done.slots.size(); ++i) {
    std::atomic<bool> undelivered{true};
    Slot& slot = slots_[done.slots[i]];
    done.running->deliver(i, slot.piece, undelivered);
    slot.mark(slot.piece);
  }
}

// Starts what is expected next, unless something that was gathered ahead is still to be used.
void GatherSchedule::start_ahead() {
  if (options_.ahead_bytes == 0 || ahead_ || all_held_) return;
  const std::vector<std::size_t> expected = expected_next();
  if (expected.empty()) {
    all_held_ = options_.keeps;
    return;
  }
  if (!options_.keeps) {
    // The prediction was wrong for pieces that were not used by now, so they are freed.
    for (Slot& each : slots_) each.piece = at::Tensor();
  }
  const DeviceMesh mesh = slots_[expected.front()].seen.spec->mesh;
  std::vector<AsyncRedistributions::Item> items;
  for (const std::size_t index : expected) {
    Slot& slot = slots_[index];
    slot.values = slot.seen.values();
    items.push_back({.route = route_between(*slot.seen.spec, slot.whole), .piece = slot.seen.piece});
  }
  const World::Scope scope(mesh.world(), "gather ahead");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  ahead_ = {.running = std::make_shared<AsyncRedistributions>(mesh, std::move(items)), .slots = expected};
}

std::vector<std::size_t> GatherSchedule::expected_next() const {
  std::vector<std::size_t> expected;
  int64_t bytes = 0;
  Last at = last_;
  for (std::size_t i = 0; i < 2 * slots_.size(); ++i) {
    const auto found = next_.find(at);
    if (found == next_.end()) break;
    at = {at[1], at[2], at[3], found->second};
    const Slot& slot = slots_[found->second];
    if (std::ranges::count(expected, found->second) > 0) break;
    if (!slot.seen.counts_writes()) continue;  // it is gathered where it is used
    if (slot.piece.defined() && slot.values == slot.seen.values()) {
      if (options_.keeps) continue;
      break;  // before it, nothing is missing; behind it, nothing is started before it is used
    }
    bytes += bytes_of_even_piece(*slot.seen.spec, slot.whole);
    if (bytes > options_.ahead_bytes && !expected.empty()) break;
    expected.push_back(found->second);
  }
  return expected;
}

}  // namespace tessera
