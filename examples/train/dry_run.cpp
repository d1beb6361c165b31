#include "tessera/examples/train/dry_run.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/data/global_batches.h"
#include "tessera/dtensor/dtensor.h"
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

// Holds bytes of one rank.
struct Bytes {
  int64_t all = 0;      // of all parameters and buffers
  int64_t trained = 0;  // of the parameters that have gradients: a tied head's own weight has none
  int64_t outside = 0;  // of those that belong to no Linear
};

Bytes bytes_on(int64_t rank, Options options, int64_t zero) {
  options.zero = zero;
  Trainer trainer(options, mesh_of(options, rank));
  torch::nn::Module& module = trainer.module();
  std::set<std::string> of_linears;
  for (const auto& each : module.named_modules()) {
    if (each.value()->as<torch::nn::Linear>() == nullptr) continue;
    of_linears.insert({each.key() + ".weight", each.key() + ".bias"});
  }
  Bytes bytes{.all = tessera::describe(module).bytes_here()};
  for (const auto& each : module.named_parameters()) {
    if (options.is_tied && each.key() == "head.weight") continue;  // tok.weight is in its place
    const auto here = static_cast<int64_t>(tessera::to_local(each.value().detach()).nbytes());
    bytes.trained += here;
    if (!of_linears.contains(each.key())) bytes.outside += here;
  }
  return bytes;
}

// Returns the bytes of the gathered parameters that stages 1 and 2 keep beside the pieces. Linear layers that compute
// in bfloat16 gather casts instead, which nothing keeps.
int64_t gathered_bytes(const Bytes& whole, const Options& options) {
  const bool is_kept = (options.zero == 1 || options.zero == 2) && options.dp > 1;
  if (!is_kept) return 0;
  return options.dtype == "bfloat16" ? whole.outside : whole.trained;
}

std::string bytes_table(const Options& options) {
  std::string text = "bytes per rank       parameters     gradients  AdamW's state           all\n";
  // All ranks of a large mesh are alike: the first has as much as any.
  std::map<int64_t, Bytes> wholes;  // without ZeRO, by the coordinate along tp, which alone decides them
  for (int64_t rank = 0; rank < std::min<int64_t>(options.ranks(), 16); ++rank) {
    const auto [found, is_new] = wholes.try_emplace(rank % options.tp);
    if (is_new) found->second = bytes_on(rank, options, 0);
    const Bytes whole = found->second, piece = options.zero == 0 ? whole : bytes_on(rank, options, options.zero);
    const int64_t parameters = piece.all + gathered_bytes(whole, options);
    // Gradients of several micro-batches are added up whole.
    const int64_t gradients = options.zero == 1 || options.accumulate > 1 ? whole.trained : piece.trained;
    text += fmt::format("rank {:<14} {:>12}  {:>12}  {:>13}  {:>12}\n", rank, parameters, gradients, 2 * piece.trained,
                        parameters + gradients + 2 * piece.trained);
  }
  if (options.ranks() > 16) text += fmt::format("and {} ranks more\n", options.ranks() - 16);
  return text;
}

}  // namespace

std::string dry_run(Options options) {
  // Shapes and dtypes alone say how much a rank would hold and send, so the step is computed on the CPU and needs no
  // GPU.
  options.dtype = compute_dtype(options);
  const std::string device = std::exchange(options.device, "cpu");
  options.is_dry_run = true;  // no rank builds the whole model
  const tessera::DeviceMesh mesh = mesh_of(options, 0);
  Trainer trainer(options, mesh);
  const tessera::Description description = tessera::describe(trainer.module());
  const std::string head = fmt::format("plan on {} on {}\n{}\nweights on rank 0\n{}\n", mesh.mesh().to_string(), device,
                                       trainer.plan(), to_string(description));
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
