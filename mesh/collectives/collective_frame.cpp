#include "tessera/mesh/collectives/collective_frame.h"

#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/collectives/backend_collectives.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/core/stream_point.h"
#include "tessera/mesh/recorder.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {
namespace {

// Begins the record of a collective and returns its sequence, or 0 where none is kept.
uint64_t begin_record(const CollectiveCall& call, int64_t bytes) {
  const World& world = call.mesh.world();
  if (!world.recorder().on()) return 0;
  const std::string& path = world.current_path();
  return world.recorder().begin({.kind = call.kind,
                                 .op = world.current_op(),
                                 .path = path == "-" ? std::string_view() : path,
                                 .mesh_dim = call.mesh.mesh_dim_name(call.mesh_dim),
                                 .ranks = call.mesh.group_ranks(call.mesh_dim),
                                 .bytes = bytes});
}

// Tells logs, observers and the recorder of a collective. Returns the sequence of its record.
uint64_t report(const CollectiveCall& call, int64_t bytes) {
  World& world = call.mesh.world();
  if (logger().should_log(spdlog::level::debug)) {
    logger().debug("rank {}: {}, {} bytes", world.rank(), call.text(world.current_op()), bytes);
  }
  if (world.check_state().inside) return 0;
  if (world.observed()) {
    world.record({.kind = call.kind,
                  .mesh_dim = call.mesh.mesh_dim_name(call.mesh_dim),
                  .bytes = bytes,
                  .op = world.current_op(),
                  .path = world.current_path()});
  }
  return begin_record(call, bytes);
}

// Runs `body`. An exception in it fails the job, since other ranks may wait for this one.
template <typename Body>
auto failing(const CollectiveCall& call, const char* op, const Body& body) {
  try {
    return body();
  } catch (...) {
    call.mesh.world().fail(call.text(op), current_error_text());
    throw;
  }
}

}  // namespace

struct PendingCollective::Work {
  CollectiveCall call;
  std::string op;  // the operator that started it
  BackendWork backend_work;
  uint64_t record = 0;     // the sequence of its record; 0: it has none
  StreamPoint begun = {};  // where its memory was taken, if it may be waited for on another stream

  void wait() const {
    Recorder& recorder = call.mesh.world().recorder();
    recorder.wait_begins(record);
    try {
      for (const auto& work : backend_work.works) work->wait();
      keep_memory();
      recorder.end(record);
    } catch (const MismatchError&) {
      recorder.end(record);  // every rank throws it, so no rank was lost, and none waits for another
      throw;
    } catch (const std::exception& error) {
      call.mesh.world().rethrow_collective_failure(call.text(op.c_str()), call.mesh.group_ranks(call.mesh_dim), error);
    }
  }

  // The stream of the start would else give the memory out again while the current one uses it.
  void keep_memory() const {
    begun.keep(backend_work.output);
    begun.keep(backend_work.input);
  }
};

namespace {

// Under Checked, compares the collective over the ranks of its group. Where they differ, `record` ends: no rank begins
// the collective.
void check(const CollectiveCall& call, const Intent& intent, uint64_t record) {
  World& world = call.mesh.world();
  if (!Checked::enabled(world)) return;
  const auto gather = [&](const at::Tensor& row) {
    PendingCollective::Work gathered{
        .call = call, .op = world.current_op(), .backend_work = gather_rows(call, row.to(call.mesh.device()))};
    gathered.wait();
    return values_on_host(gathered.backend_work.result(), world);
  };
  world.recorder().wait_begins(record);
  try {
    check_collective(call.kind, call.mesh, call.mesh_dim, intent, gather);
  } catch (const MismatchError& error) {
    world.recorder().end(record);
    world.note_mismatch(error.what());
    throw;
  }
  if (call.wait_time == WaitTime::kLater) world.recorder().wait_pauses(record);
}

}  // namespace

PendingCollective::PendingCollective(at::Tensor result, StreamPoint queued)
    : result_(std::move(result)), queued_(std::move(queued)) {}
PendingCollective::PendingCollective(std::unique_ptr<Work> work) : work_(std::move(work)) {}
PendingCollective::PendingCollective(PendingCollective&&) noexcept = default;

PendingCollective::~PendingCollective() {
  if (!work_) return;
  try {
    for (const auto& work : work_->backend_work.works) work->wait();
    work_->keep_memory();
    work_->call.mesh.world().recorder().end(work_->record);
  } catch (const std::exception& error) {
    logger().debug("a collective that nobody waited for: {}", error_text(error));
  }
}

at::Tensor PendingCollective::wait() {
  if (!work_) {
    if (!result_.defined()) throw std::logic_error("PendingCollective::wait: it has been called before; call it once");
    queued_.wait();
    queued_.keep(result_);
    return std::exchange(result_, at::Tensor());
  }
  // The call may hold the last reference to its world, which must outlive the Exclusive.
  const std::shared_ptr<World> world = work_->call.mesh.world_ptr();
  const World::Exclusive exclusive(*world);
  const detail::NotDeferred own_tensors;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unique_ptr<Work> work = std::move(work_);
  return failing(work->call, work->op.c_str(), [&] {
    work->wait();
    return work->backend_work.result();
  });
}

PendingCollective start_call(const CollectiveCall& call, int64_t bytes, const Intent& intent,
                             c10::function_ref<BackendWork()> begin) {
  World& world = call.mesh.world();
  const World::Exclusive exclusive(world);
  const detail::NotDeferred own_tensors;
  world.check_alive();
  const uint64_t record = failing(call, world.current_op(), [&] { return report(call, bytes); });
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(call, intent, record);
  PendingCollective::Work work{.call = call,
                               .op = world.current_op(),
                               .backend_work = failing(call, world.current_op(), begin),
                               .record = record};
  if (call.wait_time == WaitTime::kLater && !world.is_fake()) work.begun = StreamPoint::here(call.mesh.device());
  return PendingCollective(std::make_unique<PendingCollective::Work>(std::move(work)));
}

at::Tensor run_call(const DeviceMesh& mesh, const MeshDim& mesh_dim, c10::function_ref<PendingCollective()> start) {
  std::optional<World::Exclusive> exclusive;
  if (mesh.is_member() && mesh.size(mesh.mesh().index_of(mesh_dim)) > 1) exclusive.emplace(mesh.world());
  return start().wait();
}

}  // namespace tessera
