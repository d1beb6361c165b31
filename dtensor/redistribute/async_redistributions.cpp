#include "tessera/dtensor/redistribute/async_redistributions.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/failing.h"

namespace tessera {
namespace {

std::vector<RoutePtr> routes_of(const std::vector<AsyncRedistributions::Item>& items) {
  std::vector<RoutePtr> out;
  out.reserve(items.size());
  for (const AsyncRedistributions::Item& item : items) out.push_back(item.route);
  return out;
}

}  // namespace

AsyncRedistributions::AsyncRedistributions(const DeviceMesh& mesh, std::vector<Item> items, WaitTime wait_time)
    : mesh_(mesh),
      op_(mesh.world().current_op()),
      path_(mesh.world().current_path()),
      inference_(c10::InferenceMode::is_enabled()),
      routes_(routes_of(items)) {
  RouteExecution::Items starting;
  for (std::size_t i = 0; i < items.size(); ++i) {
    starting.push_back({routes_[i].get(), std::move(items[i].piece), items[i].owned, items[i].may_share});
  }
  execution_.emplace(mesh_, std::move(starting), wait_time);
  if (!mesh_.world().is_fake()) queued_ = StreamPoint::here(mesh_.device());
}

void AsyncRedistributions::forbid_writes(const at::Tensor& dtensor) {
  if (detail::meta(dtensor).local().is_inference()) return;  // a copy of it is sent
  detail::WriteCounters counters = detail::meta(dtensor).write_counters();
  const uint32_t writes = counters.sum();
  unwritten_.push_back({.counters = std::move(counters), .writes = writes, .text = dtensor.toString()});
}

void AsyncRedistributions::finish() {
  const c10::InferenceMode mode(inference_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const World::Scope scope(mesh_.world(), op_.c_str(), &path_);
  // All memory is that of the stream of the start.
  const StreamOfPoint stream(queued_);
  execution_->finish();
  for (std::size_t i = 0; i < routes_.size(); ++i) {
    pieces_.push_back(failing(mesh_.world(), "redistribute", [&] {
      return unaliased(execution_->piece(i), execution_->given(i), execution_->owned(i));
    }));
  }
  execution_.reset();
  if (!mesh_.world().is_fake()) queued_ = StreamPoint::here(mesh_.device());
  check_unwritten();
}

void AsyncRedistributions::check_unwritten() const {
  for (const UnwrittenTensor& each : unwritten_) {
    if (each.counters.sum() == each.writes) continue;
    throw std::runtime_error(fmt::format(
        "redistribute: the {} was written while it was being sent, so the result may be either value; read an "
        "asynchronous result before writing its source, or give a clone",
        each.text));
  }
}

void AsyncRedistributions::deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& undelivered) {
  const std::lock_guard lock(mutex_);
  if (!undelivered) return;
  if (error_) std::rethrow_exception(error_);
  std::optional<World::Exclusive> exclusive;
  const bool sends = std::ranges::any_of(routes_, [](const RoutePtr& route) { return route->communicates(); });
  if (!finished_ && sends)
    exclusive.emplace(mesh_.world());  // throws before anything has happened, if another thread communicates
  const detail::NotDeferred own_tensors;
  try {
    if (!finished_) finish();
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  finished_ = true;
  queued_.wait();
  queued_.keep(pieces_[i]);
  piece = std::move(pieces_[i]);
  undelivered = false;
}

}  // namespace tessera
