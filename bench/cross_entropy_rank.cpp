#include "tessera/bench/cross_entropy_rank.h"

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "tessera/bench/measure.h"
#include "tessera/bench/memory.h"
#include "tessera/bench/rank_server.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"
#include "tessera/placement/partition.h"

namespace tessera::bench {
namespace {

at::Tensor scrambled(const at::Tensor& places) { return places.mul(2654435761).remainder(1009).sub_(504); }

// Holds this rank's logits and all targets. cross_entropy_peer.py computes the same values.
struct LossCase {
  LossCase(const std::string& text, const DeviceMesh& on) : mesh(on) {
    std::string dtype;
    std::istringstream in(text);
    if (!(in >> dtype >> tokens >> classes)) {
      throw std::invalid_argument(fmt::format("\"{}\" is not DTYPE TOKENS CLASSES", text));
    }
    const Interval mine = chunk_range(classes, mesh.size(), mesh.local_rank(0));
    const at::Tensor rows = at::arange(tokens, at::kLong), columns = at::arange(mine.begin, mine.end, at::kLong);
    const at::Tensor places = rows.mul(classes).unsqueeze(1) + columns;
    logits = scrambled(places).to(at::kFloat).div_(100).to(dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
    logits.requires_grad_();
    target = rows.mul(7919).remainder(classes);
  }

  at::Tensor loss(const std::string& way) const {
    if (way == "ours") return sharded_cross_entropy(logits, target, mesh, {.classes = classes});
    const at::Tensor cut = from_local(logits, mesh, {Shard(1)}, {.shape = std::vector<int64_t>{tokens, classes}});
    return at::cross_entropy_loss(to_local(redistribute(cut, {Replicate()})), target);
  }
  double step(const std::string& way) const {
    logits.mutable_grad().reset();
    const at::Tensor out = loss(way);
    out.backward();
    return out.item<double>();
  }

  std::string digest(const std::string& way) const {
    const double value = step(way);
    const at::Tensor gradient = logits.grad().to(at::kDouble).flatten();
    const at::Tensor products = gradient * scrambled(at::arange(gradient.numel(), at::kLong));
    return fmt::format("{} {} {}", value, products.sum().item<double>(), products.abs().sum().item<double>());
  }
  int64_t bytes() const { return static_cast<int64_t>(logits.nbytes()); }
  int64_t peak(const std::string& way) const {
    step(way);  // makes the memory that a group keeps, so that it is not counted
    logits.mutable_grad().reset();
    restart_peak();
    const int64_t before = allocated_bytes();
    step(way);
    return bytes() + peak_bytes() - before;
  }

  const DeviceMesh mesh;
  int64_t tokens = 0;
  int64_t classes = 0;
  at::Tensor logits, target;
};

}  // namespace

void serve_cross_entropy(const std::string& socket) {
  at::set_num_threads(1);
  restart_peak();
  const auto world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  std::unique_ptr<LossCase> loss;
  serve(socket, *world, [&](const std::string& what, const std::string& rest) {
    if (what == "case") {
      loss.reset();
      loss = std::make_unique<LossCase>(rest, mesh);
      return fmt::format("{}", loss->bytes());
    }
    if (what == "digest") return loss->digest(rest);
    if (what == "peak") return fmt::format("{}", loss->peak(rest));
    if (mesh.size() > 1) barrier(mesh, 0);
    return fmt::format("{}", time_calls([&] { loss->step(what); }, std::stoi(rest)));
  });
}

}  // namespace tessera::bench
