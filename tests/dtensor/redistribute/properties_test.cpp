// Tests what holds for any two layouts, on any mesh, of any tensor, redistributed on ranks that are threads.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/placement/exchange.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/plan.h"
#include "tessera/tests/dtensor/redistribute/pairs.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/placement/any_layout.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

template <typename Body>
void on_threads(const Change& change, const Body& body) {
  run_in_process(Mesh(change.mesh_shape).size(), [&](const std::shared_ptr<World>& world) {
    body(init_device_mesh(device_name(), change.mesh_shape, {}, world));
  });
}

int64_t sum(const std::vector<int64_t>& numbers) {
  int64_t out = 0;
  for (const int64_t number : numbers) out += number;
  return out;
}

// Compares step by step what a plan says that this rank sends with the recorded collectives.
class Account {
 public:
  Account(const Plan& plan, const DeviceMesh& mesh, const std::vector<CollectiveRecord>& records)
      : plan_(plan), mesh_(mesh), records_(records), splits_(plan.splits(mesh.world().rank())) {}

  // Returns the bytes that all ranks receive from this one. Throws if a step did not send what was planned.
  double received() {
    double out = 0;
    for (std::size_t i = 0; i < splits_.size(); ++i) out += received_in(i);
    if (next_ != records_.size()) throw std::runtime_error("unplanned: " + std::string(records_[next_].kind));
    return out;
  }

 private:
  // A step that sends nothing in this rank's group may run no collective.
  double received_in(std::size_t i) {
    const PlanStep& step = plan_.steps()[i];
    if (next_ == records_.size() || records_[next_].kind != std::string(to_string(step.kind))) return nothing(i);
    const int64_t given = records_[next_].bytes;
    const auto n = static_cast<double>(MergedDims(mesh_.mesh().shape(), step.mesh_dims).size());
    const int64_t sent = sum(splits_[i].send) * width();
    ++next_;
    switch (step.kind) {
      case PlanStep::Kind::kLocal: return 0;
      case PlanStep::Kind::kAllGather:
        agree(i, static_cast<double>(given) * (n - 1) == static_cast<double>(sent));
        break;
      case PlanStep::Kind::kAllToAll:
      case PlanStep::Kind::kPermute: agree(i, given == sent || given == sent + stays(step)); break;
      case PlanStep::Kind::kAllReduce: return 2 * (n - 1) / n * static_cast<double>(given);
      case PlanStep::Kind::kReduceScatter: return (n - 1) / n * static_cast<double>(given);
    }
    return static_cast<double>(sent);
  }

  double nothing(std::size_t i) {
    agree(i, sum(splits_[i].send) == 0);
    return 0;
  }
  void agree(std::size_t i, bool good) const {
    if (!good)
      throw std::runtime_error("step " + std::to_string(i) + " gave otherwise than planned:\n" + plan_.to_string());
  }
  int64_t width() const { return static_cast<int64_t>(c10::elementSize(plan_.dtype())); }
  int64_t stays(const PlanStep& step) const {
    const auto tile = [&](const Placements& placements) {
      return local_tile(plan_.shape(), placements, mesh_.mesh().shape(), *mesh_.coordinate());
    };
    return overlap(tile(step.from), tile(step.to)) * width();
  }

  const Plan& plan_;
  const DeviceMesh& mesh_;
  const std::vector<CollectiveRecord>& records_;
  const std::vector<Splits> splits_;
  std::size_t next_ = 0;
};

}  // namespace

TEST_CASE("from any layout to any other and back the value stays, and every rank has its part of it") {
  check_property([] {
    const Change change = *any_change();
    on_threads(change, [&](const DeviceMesh& mesh) {
      check_pair({.from = change.from, .to = change.to}, whole_numbers(change.shape, change.dtype), mesh);
    });
  });
}

TEST_CASE("the gradient of a redistribution has the source's layout, from any layout to any other") {
  check_property([] {
    Change change = *any_change();
    RC_PRE(change.dtype == at::kDouble);
    on_threads(change, [&](const DeviceMesh& mesh) {
      check_gradient({.from = change.from, .to = change.to}, change.shape, mesh);
    });
  });
}

TEST_CASE("collectives send the bytes that the plan says") {
  check_property([] {
    const Change change = *any_change();
    std::vector<double> received(static_cast<std::size_t>(Mesh(change.mesh_shape).size()));
    int64_t planned = 0;
    on_threads(change, [&](const DeviceMesh& mesh) {
      const at::Tensor source = spread(whole_numbers(change.shape, change.dtype), mesh, change.from);
      const CommCounter counter(mesh);
      const at::Tensor moved = redistribute(source, change.to);
      const RoutePtr route = route_between(spec_of(source), placements_of(moved));
      const int64_t rank = mesh.world().rank();
      received[static_cast<std::size_t>(rank)] = Account(route->plan(), mesh, counter.records()).received();
      if (rank == 0) planned = route->plan().total_bytes();
    });
    double all = 0;
    for (const double each : received) all += each;
    RC_ASSERT(static_cast<int64_t>(all + 0.5) == planned);
  });
}
