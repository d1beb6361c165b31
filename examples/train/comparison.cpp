#include "tessera/examples/train/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "tessera/dtensor/data/global_batches.h"
#include "tessera/examples/train/trainer.h"

namespace train {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A NaN counts as infinity, which no other difference exceeds.
double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= largest)) largest = std::isnan(difference) ? kInfinity : difference;
  }
  return largest;
}

}  // namespace

std::vector<double> losses_of(const Options& options, const Windows& windows,
                              const std::optional<tessera::DeviceMesh>& mesh) {
  Options in_float64 = options;
  in_float64.dtype = "float64";
  Trainer trainer(in_float64, mesh);
  const tessera::GlobalBatches batches(windows.size(), options.batch, static_cast<uint64_t>(options.seed));
  std::vector<double> losses;
  for (int64_t step = 0; step < options.check_steps; ++step) {
    losses.push_back(trainer.step(windows, batches, step).loss.item<double>());
  }
  return losses;
}

Comparison compare_with_one_process(Options options, const Windows& windows, const tessera::DeviceMesh& mesh) {
  options.batch = options.accumulate * std::max<int64_t>(1, 4 / options.accumulate);
  Options without_dropout = options;
  without_dropout.dropout = 0.0;
  const std::vector<double> drawn = losses_of(options, windows, mesh);
  const std::vector<double> exact = losses_of(without_dropout, windows, mesh);
  if (mesh.world().rank() != mesh.mesh().ranks().front()) return {};
  const tessera::DeviceMesh alone =
      tessera::init_device_mesh(options.device, {1, 1}, {"dp", "tp"}, tessera::World::create({}));
  return {.with_dropout = largest_difference(drawn, losses_of(options, windows, alone)),
          .without_dropout = largest_difference(exact, losses_of(without_dropout, windows, std::nullopt))};
}

}  // namespace train
