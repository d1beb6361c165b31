// Trains a small causal transformer on a mesh {dp, tp}, and saves the run after every epoch:
//
//   train FOLDER EPOCHS             begins a run
//   train FOLDER EPOCHS --resume    goes on after the last epoch that FOLDER has, until EPOCHS epochs are done in all
//
// --dropout P sets the probability of dropout, and --float64 the dtype. docs/training.md explains the steps.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>

#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/dtensor/random.h"
#include "tessera/examples/train/sequences.h"
#include "tessera/examples/train/transformer.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"

namespace {

struct Options {
  std::string folder;
  std::size_t epochs = 0;
  bool is_resumed = false;
  bool is_float64 = false;
  double dropout = 0.1;
};

Options options_of(int argc, char** argv) {
  if (argc < 3) throw std::invalid_argument("usage: train FOLDER EPOCHS [--resume] [--float64] [--dropout P]");
  Options options{.folder = argv[1], .epochs = std::stoull(argv[2])};
  for (int i = 3; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--resume") {
      options.is_resumed = true;
    } else if (option == "--float64") {
      options.is_float64 = true;
    } else if (option == "--dropout" && i + 1 < argc) {
      options.dropout = std::stod(argv[++i]);
    } else {
      throw std::invalid_argument("train does not know the argument " + option);
    }
  }
  return options;
}

// Cuts the layers over pairs of ranks, and the batch over the pairs.
tessera::DeviceMesh mesh_of_this_job() {
  const auto world = tessera::World::from_environment();
  const int64_t ranks = world->size(), tp = ranks % 2 == 0 ? 2 : 1;
  return tessera::init_device_mesh("cpu", {ranks / tp, tp}, {"dp", "tp"}, world);
}

tessera::ParallelPlan make_plan() {
  return {
      {"tok", tessera::RowwiseParallel()},
      {"layers.*.attn.w[qkv]", tessera::ColwiseParallel()},
      {"layers.*.attn.wo", tessera::RowwiseParallel()},
      {"layers.*.mlp.up", tessera::ColwiseParallel()},
      {"layers.*.mlp.down", tessera::RowwiseParallel()},
      {"head", tessera::ColwiseParallel()},  // logits are cut along the vocabulary
  };
}

// ---- Checkpoints: a folder for each epoch. The weights are written last, so a folder that has them is complete.

std::string folder_of_epoch(const std::string& folder, std::size_t epoch) {
  return folder + "/epoch_" + std::to_string(epoch);
}

std::size_t epochs_saved(const std::string& folder) {
  std::size_t epochs = 0;
  while (std::filesystem::exists(folder_of_epoch(folder, epochs + 1) + "/model.safetensors")) ++epochs;
  return epochs;
}

// Every rank calls it.
void save(const Transformer& model, const torch::optim::Optimizer& optimizer, const tessera::DeviceMesh& mesh,
          const std::string& folder) {
  std::filesystem::create_directories(folder);
  tessera::save_optimizer(optimizer, *model, folder + "/optimizer.safetensors");
  const tessera::RandomState& random = mesh.world().random_state();
  tessera::save_weights(
      *model, folder,
      {.metadata = {
           {"format", "pt"}, {"seed", std::to_string(random.seed)}, {"draws", std::to_string(random.counter)}}});
}

// Every rank calls it.
void resume(Transformer& model, torch::optim::Optimizer& optimizer, torch::optim::LRScheduler& scheduler,
            const tessera::DeviceMesh& mesh, std::size_t epochs, const std::string& folder) {
  tessera::load_weights(*model, folder);
  for (std::size_t i = 0; i < epochs; ++i) scheduler.step();
  tessera::load_optimizer(optimizer, *model, folder + "/optimizer.safetensors");  // after the steps: it sets the rate
  const std::map<std::string, std::string> saved = tessera::Checkpoint(folder).metadata();
  mesh.world().random_state() = {.seed = std::stoull(saved.at("seed")), .counter = std::stoull(saved.at("draws"))};
}

// ---- The job

void train(const Options& options) {
  const tessera::DeviceMesh mesh = mesh_of_this_job();
  const bool is_first = mesh.world().rank() == 0;
  const std::size_t done = epochs_saved(options.folder);
  if (done > 0 && !options.is_resumed) {
    throw std::invalid_argument(options.folder + " has a run; give --resume to go on with it, or another folder");
  }
  if (options.is_float64) torch::set_default_dtype(caffe2::TypeMeta::Make<double>());

  torch::manual_seed(1);                  // the first values
  tessera::manual_seed(1, mesh.world());  // dropout
  Transformer model(options.dropout);
  auto parallel = tessera::parallelize_module(model, mesh, make_plan());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3).weight_decay(0.01));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/2, /*gamma=*/0.5);

  if (done > 0) resume(model, optimizer, scheduler, mesh, done, folder_of_epoch(options.folder, done));

  Sequences sequences;
  for (std::size_t epoch = done; epoch < options.epochs; ++epoch) {
    torch::data::samplers::DistributedRandomSampler sampler(
        *sequences.size(), static_cast<std::size_t>(mesh.size("dp")), static_cast<std::size_t>(mesh.local_rank("dp")));
    sampler.set_epoch(epoch);
    const auto loader =
        torch::data::make_data_loader(sequences.map(torch::data::transforms::Stack<>()), sampler, /*batch_size=*/8);
    for (const torch::data::Example<>& batch : *loader) {
      const at::Tensor ids = tessera::from_local(batch.data, mesh, {tessera::Shard(0), tessera::Replicate()});
      const at::Tensor target = tessera::from_local(batch.target, mesh, {tessera::Shard(0), tessera::Replicate()});
      optimizer.zero_grad();
      const at::Tensor loss = torch::cross_entropy_loss(parallel(ids).flatten(0, 1), target.flatten());
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      const double value = loss.item<double>();  // an all-reduce: every rank calls it
      if (is_first) std::cout << "epoch " << epoch << " loss " << std::setprecision(17) << value << std::endl;
    }
    scheduler.step();
    save(model, optimizer, mesh, folder_of_epoch(options.folder, epoch + 1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(options_of(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "train: " << error.what() << std::endl;
    return 1;
  }
}
