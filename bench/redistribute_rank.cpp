#include "tessera/bench/redistribute_rank.h"

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "tessera/bench/measure.h"
#include "tessera/bench/rank_server.h"
#include "tessera/bench/raw_route.h"
#include "tessera/bench/redistribute_cases.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/mesh/collectives/collectives.h"

namespace tessera::bench {
namespace {

// Returns a checksum of the values and their positions, so that another order gives another sum. It is exact, since the
// values are whole numbers. redistribute_peer.py computes the same.
int64_t checksum(const at::Tensor& local) {
  const at::Tensor places = at::arange(local.numel(), at::kLong);
  return local.flatten().to(at::kLong).mul(places.mul(2654435761).remainder(1009)).sum().item<int64_t>();
}

// Runs one case on this rank, with a DTensor and with raw calls.
class Redistribution {
 public:
  Redistribution(const RedistributeCase& wanted, const DeviceMesh& mesh) : to_(wanted.to), tensor_(make(wanted, mesh)) {
    const SpecPtr source = intern_spec(mesh, wanted.from, wanted.shape, at::kFloat);
    const RoutePtr route = route_between(*source, wanted.to);
    communicates_ = route->communicates();
    raw_.emplace(route->plan(), mesh);
  }

  at::Tensor ours() const { return redistribute(tensor_, to_); }
  at::Tensor raw() const { return raw_->run(local_); }

  std::string check() const {
    const at::Tensor result = to_local(ours());
    if (!at::equal(result, raw())) throw std::logic_error("raw calls give other elements");
    return fmt::format("{} {} {}", result.numel(), checksum(result), communicates_ ? 1 : 0);
  }

 private:
  // The pieces of a Partial are the whole tensor on every rank.
  at::Tensor make(const RedistributeCase& wanted, const DeviceMesh& mesh) {
    const at::Tensor whole =
        at::arange(wanted.bytes() / 4, at::kLong).remainder_(251).to(at::kFloat).view(wanted.shape);
    Placements cut = wanted.from;
    for (Placement& each : cut) each = each.is_partial() ? Replicate() : each;
    local_ = to_local(distribute_tensor(whole, mesh, cut, kNoSource)).clone();
    return from_local(local_, mesh, wanted.from, {.shape = wanted.shape});
  }

  const Placements to_;
  at::Tensor local_;
  const at::Tensor tensor_;
  bool communicates_ = false;
  std::optional<RawRoute> raw_;
};

}  // namespace

void serve_redistribute(const std::string& socket) {
  at::set_num_threads(1);
  const c10::AutoGradMode no_gradients(false);
  const auto world = World::from_environment();
  const DeviceMesh all = init_device_mesh("cpu", {world->size()}, {}, world);
  std::map<std::vector<int64_t>, DeviceMesh> meshes;
  std::unique_ptr<Redistribution> subject;
  serve(socket, *world, [&](const std::string& what, const std::string& rest) {
    if (what == "case") {
      subject.reset();
      const RedistributeCase wanted = RedistributeCase::parse(rest);
      const auto made = meshes.try_emplace(wanted.mesh, init_device_mesh("cpu", wanted.mesh, {}, world)).first;
      subject = std::make_unique<Redistribution>(wanted, made->second);
      return subject->check();
    }
    barrier(all, 0);
    const auto body = [&] { what == "ours" ? subject->ours() : subject->raw(); };
    return fmt::format("{}", time_calls(body, std::stoi(rest)));
  });
}

}  // namespace tessera::bench
