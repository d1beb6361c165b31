#include "tessera/examples/train/dry_run.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/data/global_batches.h"
#include "tessera/examples/train/trainer.h"
#include "tessera/examples/train/windows.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/describe.h"

namespace train {
namespace {

tessera::DeviceMesh mesh_of(const Options& options, int64_t rank) {
  return tessera::init_device_mesh("cpu", {options.dp, options.tp}, {"dp", "tp"},
                                   tessera::World::fake(rank, options.ranks()));
}

int64_t weights_on(int64_t rank, Options options, int64_t zero) {
  options.zero = zero;
  Trainer trainer(options, mesh_of(options, rank));
  return tessera::describe(trainer.module()).bytes_here();
}

std::string bytes_table(const Options& options) {
  std::string text = "bytes per rank       parameters     gradients  AdamW's state           all\n";
  // All ranks of a large mesh are alike: the first has as much as any.
  std::map<int64_t, int64_t> wholes;  // without ZeRO, by the coordinate along tp, which alone decides them
  for (int64_t rank = 0; rank < std::min<int64_t>(options.ranks(), 16); ++rank) {
    const auto [found, is_new] = wholes.try_emplace(rank % options.tp);
    if (is_new) found->second = weights_on(rank, options, 0);
    const int64_t whole = found->second, piece = options.zero == 0 ? whole : weights_on(rank, options, options.zero);
    // In stages 1 and 2 the gathered parameters are kept beside the pieces.
    const int64_t parameters = options.zero == 1 || options.zero == 2 ? piece + whole : piece;
    // Gradients of several micro-batches are added up whole.
    const int64_t gradients = options.zero == 1 || options.accumulate > 1 ? whole : piece;
    text += fmt::format("rank {:<14} {:>12}  {:>12}  {:>13}  {:>12}\n", rank, parameters, gradients, 2 * piece,
                        parameters + gradients + 2 * piece);
  }
  if (options.ranks() > 16) text += fmt::format("and {} ranks more\n", options.ranks() - 16);
  return text;
}

}  // namespace

std::string dry_run(Options options) {
  // Shapes and dtypes alone say how much a rank would hold and send, so the step is computed on the CPU and needs no
  // GPU.
  options.dtype = compute_dtype(options);
  options.device = "cpu";
  const tessera::DeviceMesh mesh = mesh_of(options, 0);
  Trainer trainer(options, mesh);
  const tessera::Description description = tessera::describe(trainer.module());
  const std::string head =
      fmt::format("plan on {}\n{}\nweights on rank 0\n{}\n", mesh.to_string(), trainer.plan(), to_string(description));
  const Windows windows(std::string(static_cast<std::size_t>(options.sequence) * 2, ' '), options.sequence);
  const tessera::GlobalBatches batches(windows.size(), options.batch, 0);
  // In the first two steps, the order of gradients and of gathered parameters is learned.
  for (int64_t step = 0; step < 2; ++step) {
    trainer.compute_gradients(windows, batches, step);
    trainer.optimizer().step();
  }
  const tessera::CommCounter counter(mesh);
  trainer.compute_gradients(windows, batches, 2);
  return head + bytes_table(options) +
         fmt::format("\ncollectives of a step: {} of {} bytes\n{}", counter.total(), counter.total_bytes(),
                     counter.to_string());
}

}  // namespace train
