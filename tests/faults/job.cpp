#include "tessera/tests/faults/job.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/stable_hash.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/faults/fault_plan.h"
#include "tessera/tests/faults/injector.h"

namespace tessera::faults {
namespace {

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(12, 24));
    down = register_module("down", torch::nn::Linear(24, 12));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = torch::gelu(up(x));
    faults::at("forward");
    if (inner.requires_grad()) inner.register_hook([](const at::Tensor&) { faults::at("backward"); });
    return down(inner);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

struct AtDestruction {
  ~AtDestruction() { faults::at("destructor"); }
};

// Holds what a rank trains.
struct Training {
  explicit Training(const DeviceMesh& on, int64_t data_seed) : mesh(on), sum_options(at::dtype(at::kDouble)) {
    torch::manual_seed(static_cast<uint64_t>(data_seed));
    x = torch::randn({6, 12}, sum_options);
    target = torch::randn({6, 12}, sum_options);
    model = Mlp();
    parallel.emplace(parallelize_module(model, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}));
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  TrainingState state(int64_t step) {
    return {.mesh = mesh, .model = *model, .optimizer = optimizer.get(), .step = step};
  }

  DeviceMesh mesh;
  at::TensorOptions sum_options;
  at::Tensor x, target;
  Mlp model{nullptr};
  std::optional<Parallelized<Mlp>> parallel;
  std::unique_ptr<torch::optim::SGD> optimizer;
};

uint64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor whole = full_tensor(tensor).detach().contiguous();
  return stable_hash(std::string(static_cast<const char*>(whole.const_data_ptr()), whole.nbytes()));
}

// Every rank takes part, and gets the same number.
std::string hash_of(Training& training) {
  std::string all;
  for (const auto& parameter : training.model->named_parameters()) {
    all += fmt::format("{} {:x} ", parameter.key(), hash_of(parameter.value()));
    const auto found = training.optimizer->state().find(parameter.value().unsafeGetTensorImpl());
    if (found == training.optimizer->state().end()) continue;
    const auto& momentum = static_cast<const torch::optim::SGDParamState&>(*found->second).momentum_buffer();
    if (momentum.defined()) all += fmt::format("{:x} ", hash_of(momentum));
  }
  return fmt::format("{:016x}", stable_hash(all));
}

// The victim of "order", "dtype", "shape" and "operation" calls something else than the others.
void communicate(const DeviceMesh& mesh) {
  const std::string wrong = faults::at("collective");
  const at::Tensor ones =
      wrong == "dtype" ? at::ones({4}, at::kFloat) : at::ones({wrong == "shape" ? 5 : 4}, at::kDouble);
  if (wrong == "order") all_gather(ones, mesh, 0);
  all_reduce(ones, mesh, 0, wrong == "operation" ? ReduceOp::kMax : ReduceOp::kSum);
  if (wrong != "order") all_gather(ones, mesh, 0);
}

void redistribute_asynchronously(const DeviceMesh& mesh) {
  const at::Tensor rows = distribute_tensor(at::ones({6, 2}, at::kDouble), mesh, {Shard(0)});
  const at::Tensor pending = redistribute(rows, {Replicate()}, {.async = true});
  faults::at("async");
  if (full_tensor(pending).sum().item<double>() != 12) throw std::logic_error("the redistribution gave a wrong sum");
}

void train_step(Training& training) {
  communicate(training.mesh);
  training.mesh.world().guard("the user's hook", [] { faults::at("hook"); });
  training.optimizer->zero_grad();
  {
    const ImplicitReplication guard;
    torch::mse_loss((*training.parallel)(training.x), training.target).backward();
  }
  training.optimizer->step();
  redistribute_asynchronously(training.mesh);
}

// Returns the hashes of the states after each step.
std::vector<std::string> train(Training& training, const std::string& states) {
  std::vector<std::string> hashes;
  TrainingStateSaver saver(states, {.keep = 2, .progress = [](int64_t, int64_t) { faults::at("save"); }});
  for (int64_t step = 1; step <= kSteps; ++step) {
    train_step(training);
    say(fmt::format("state {} {}", step, hashes.emplace_back(hash_of(training))));
    if (step % 2 == 1) {
      saver.save(training.state(step));  // waits for the one before too
      if (step > 1) say(fmt::format("saved {}", step - 1));
      say(fmt::format("saved {}", step));
    } else {
      saver.start(training.state(step));
    }
  }
  saver.wait();
  say(fmt::format("saved {}", kSteps));
  return hashes;
}

// An error of the disk counts as damage of the newest state: where a fault is planned, the one before may be loaded.
void load(Training& training, const std::string& states, const std::vector<std::string>& hashes) {
  {
    const torch::NoGradGuard guard;
    for (at::Tensor& parameter : training.model->parameters()) parameter.zero_();
  }
  TrainingState state = training.state(0);
  faults::at("load");
  const bool found = load_newest_training_state(state, states);
  const std::string loaded = hash_of(training);
  // With two jobs in one folder the newest state may be the other one's.
  if (std::getenv("TESSERA_FAULTS_SHARED") != nullptr) return;
  const int64_t oldest = std::getenv(faults::kPlanVariable) != nullptr ? kSteps - 1 : kSteps;
  const bool right = found && state.step >= oldest && state.step <= kSteps &&
                     loaded == hashes.at(static_cast<std::size_t>(state.step - 1));
  if (!right) {
    throw std::logic_error(
        fmt::format("loaded {} of step {}, where {} was saved", loaded, state.step, fmt::join(hashes, ", ")));
  }
}

void run_training(const std::string& folder, int64_t data_seed) {
  if (const char* const nap = std::getenv("TESSERA_FAULTS_NAP"); nap != nullptr) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::stoll(nap)));
  }
  faults::at("start");
  const auto world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  faults::at("groups");
  if (const char* const nap = std::getenv("TESSERA_FAULTS_SLOW"); nap != nullptr) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::stoll(nap)));
  }
  Training training(mesh, data_seed);
  const AtDestruction last;
  load(training, folder + "/states", train(training, folder + "/states"));
  say(visits());
  say("done");
}

void verify(const std::string& folder, int64_t data_seed) {
  const auto world = World::from_environment();
  Training training(init_device_mesh("cpu", {world->size()}, {"tp"}, world), data_seed);
  TrainingState state = training.state(0);
  if (load_newest_training_state(state, folder + "/states")) {
    say(fmt::format("newest {} {}", state.step, hash_of(training)));
  } else {
    say("newest none");
  }
  state.step += 100;
  save_training_state(state, folder + "/states");  // sweeps what a killed save has left
  say("done");
}

void talk(int64_t lines) {
  const auto world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  barrier(mesh, 0);
  for (int64_t i = 0; i < lines; ++i) say(fmt::format("line {:06d} {}", i, std::string(100, '.')));
  barrier(mesh, 0);
  say("done");
}

}  // namespace

int run_job(const std::vector<std::string>& arguments) {
  const std::string& what = arguments.at(0);
  const std::string& folder = arguments.at(1);
  const int64_t number = std::stoll(arguments.at(2));
  const char* const data = std::getenv("TESSERA_FAULTS_DATA");
  const char* const rank = std::getenv("RANK");
  const char* const store = std::getenv("TESSERA_STORE");
  arm(rank == nullptr ? 0 : std::stoll(rank), store == nullptr ? "" : store, folder + "/states");
  try {
    if (what == "train") run_training(folder, data == nullptr ? number : std::stoll(data));
    if (what == "verify") verify(folder, number);
    if (what == "talk") talk(number);
    faults::at("exit");
  } catch (const std::exception& error) {
    say(fmt::format("error: {}", error.what()));
    return 1;
  }
  return 0;
}

}  // namespace tessera::faults
