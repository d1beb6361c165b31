// Is a rank of a job of leaks_test, which the first argument names: "reduce", "train FOLDER", or "fail", where the last
// rank throws and all of them catch their error; "lose" is "reduce" that also loses memory.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/styles/parallelize.h"

using namespace tessera;

namespace {

// A pointer to one of them may stay in a register or on the stack, where LeakSanitizer would find it.
[[gnu::noinline]] void lose_memory() {
  for (int64_t i = 0; i < 16; ++i) {
    auto* lost = new std::vector<int64_t>(4, i);
    asm volatile("" : "+r"(lost));
  }
}

bool reduce(const DeviceMesh& mesh) {
  const at::Tensor sum = all_reduce(at::ones({4}), mesh, 0, ReduceOp::kSum);
  const at::Tensor numbers = at::arange(10, at::kDouble);
  const at::Tensor whole = redistribute(distribute_tensor(numbers, mesh, {Shard(0)}), {Replicate()});
  return sum.equal(at::full({4}, mesh.size(0), at::kFloat)) && to_local(whole).equal(numbers);
}

struct Training {
  explicit Training(const DeviceMesh& on) : mesh(on) {}

  DeviceMesh mesh;
  torch::nn::Sequential model{torch::nn::Linear(6, 10), torch::nn::GELU(), torch::nn::Linear(10, 3)};
  Parallelized<torch::nn::Sequential> parallel =
      parallelize_module(model, mesh, {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(0.01)};

  double step() {
    optimizer.zero_grad();
    const at::Tensor loss = parallel(at::ones({5, 6})).pow(2).sum();
    loss.backward();
    clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    return loss.item<double>();
  }
};

// Trains, saves what it has, and goes on from there with a model of its own.
bool train(const DeviceMesh& mesh, const std::string& folder) {
  Training first(mesh);
  first.step();
  {
    TrainingStateSaver saver(folder, {.keep = 2});
    for (int64_t step = 1; step <= 3; ++step) {
      saver.start({.mesh = mesh, .model = *first.model, .optimizer = &first.optimizer, .step = step});
      saver.wait();
      if (step < 3) first.step();
    }
  }
  Training second(mesh);
  TrainingState state = {.mesh = mesh, .model = *second.model, .optimizer = &second.optimizer};
  return load_newest_training_state(state, folder) && state.step == 3 && first.step() == second.step();
}

// Says whether this rank got the last rank's error.
bool fail(const DeviceMesh& mesh) {
  try {
    mesh.world().guard("the test's loop", [&] {
      if (mesh.world().rank() == mesh.world().size() - 1) throw std::out_of_range("index 7 is out of range");
      reduce(mesh);
    });
  } catch (const std::exception& error) {
    return std::string(error.what()).find("index 7 is out of range") != std::string::npos;
  }
  return false;
}

bool run(const std::string& job, const std::string& folder) {
  const std::shared_ptr<World> world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"m"}, world);
  if (job == "train") return train(mesh, folder);
  return job == "fail" ? fail(mesh) : reduce(mesh);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string job = argc > 1 ? argv[1] : "reduce";
  const bool right = run(job, argc > 2 ? argv[2] : "");
  fmt::print("the results are {}\n", right ? "right" : "wrong");
  std::fflush(stdout);  // a process whose leaks were found ends without this
  if (job == "lose") lose_memory();
  return right ? 0 : 1;
}
