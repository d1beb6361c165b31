#include "tessera/bench/train_rank.h"

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>

#include "tessera/bench/measure.h"
#include "tessera/bench/rank_server.h"
#include "tessera/bench/raw_training.h"
#include "tessera/bench/train_case.h"
#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/language_model/parallel_plan.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/styles/parallelize.h"

namespace tessera::bench {
namespace {

TransformerOptions model_options(const TrainCase& size) {
  return {.vocabulary = TrainCase::kVocabulary,
          .hidden = size.hidden,
          .layers = size.layers,
          .heads = size.heads,
          .sequence = size.sequence,
          .dropout = 0,
          .tied = false};
}

// Trains the plain model, to which Tessera applies the plan of tools/train.
class OurTraining {
 public:
  OurTraining(const TrainCase& size, const DeviceMesh& mesh) : model_(model_options(size)) {
    fill(size);
    ParallelizeOptions options;
    if (size.zero > 0) {
      options.data_placement = Shard(0);
      options.zero_stage = size.zero;
    }
    parallelize_module(model_, mesh, sequence_parallel_plan(), options);
    const auto [ids, targets] = rows_of(size, mesh.local_rank("dp"));
    const auto whole = [&](const at::Tensor& rows) { return from_local(rows, mesh, {Shard(0), Replicate()}); };
    ids_ = whole(ids);
    targets_ = whole(targets).flatten();
    optimizer_ = std::make_unique<torch::optim::AdamW>(
        model_->parameters(), torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(0.1));
  }

  TrainStep step() {
    const ImplicitReplication plain_positions;
    optimizer_->zero_grad();
    const at::Tensor loss = torch::nn::functional::cross_entropy(model_(ids_).flatten(0, 1), targets_);
    loss.backward();
    const double value = loss.item<double>();
    const double norm = clip_grad_norm_(model_->parameters(), 1.0);
    optimizer_->step();
    return {.loss = value, .norm = norm};
  }

 private:
  void fill(const TrainCase& size) {
    const c10::AutoGradMode no_gradient(false);
    const std::vector<TrainParameter> all = all_parameters(size);
    const std::vector<at::Tensor> parameters = model_->parameters();
    for (std::size_t i = 0; i < all.size(); ++i) {
      parameters.at(i).copy_(first_values(size, all[i], static_cast<int64_t>(i)));
    }
  }

  Transformer model_;
  at::Tensor ids_, targets_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

template <class Training>
std::string losses_of(Training&& training, int64_t steps) {
  std::string out;
  for (int64_t i = 0; i < steps; ++i) {
    const TrainStep step = training.step();
    out += fmt::format("{:.9g} {:.9g} ", step.loss, step.norm);
  }
  return out;
}

std::pair<std::string, int64_t> way_and_steps(const std::string& text) {
  std::istringstream in(text);
  std::pair<std::string, int64_t> out;
  in >> out.first >> out.second;
  return out;
}

}  // namespace

void serve_train(const std::string& socket) {
  at::set_num_threads(1);
  const auto world = World::from_environment();
  TrainCase size;
  std::optional<DeviceMesh> mesh;
  std::unique_ptr<RawTraining> hand;
  std::unique_ptr<OurTraining> ours;
  serve(socket, *world, [&](const std::string& what, const std::string& rest) -> std::string {
    if (what == "case") {
      size = TrainCase::parse(rest);
      hand.reset();
      ours.reset();
      mesh = init_device_mesh("cpu", {size.dp, size.tp}, {"dp", "tp"}, world);
      hand = std::make_unique<RawTraining>(size, *mesh);
      ours = std::make_unique<OurTraining>(size, *mesh);
      return "ok";
    }
    if (what == "losses") {
      const auto [way, steps] = way_and_steps(rest);
      return way == "hand" ? losses_of(RawTraining(size, *mesh), steps) : losses_of(OurTraining(size, *mesh), steps);
    }
    for (int64_t dim = 0; dim < 2; ++dim) barrier(*mesh, dim);
    const int steps = std::stoi(rest);
    return fmt::format(
        "{}", what == "hand" ? time_calls([&] { hand->step(); }, steps) : time_calls([&] { ours->step(); }, steps));
  });
}

}  // namespace tessera::bench
