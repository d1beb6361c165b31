#include "tessera/bench/checkpoint_rank.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include "tessera/bench/memory.h"
#include "tessera/bench/rank_server.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::bench {
namespace {

constexpr int64_t kSide = 1024;  // a parameter has 4 MiB, and its optimizer's state twice as many

double microseconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

// Returns what a rank holds of the parameter `i`: all of it ("dp"), its rows ("zero"), or by turns rows and columns
// ("tp").
Placement placement_of(const std::string& layout, int64_t i) {
  if (layout == "dp") return Replicate();
  if (layout == "zero") return Shard(0);
  if (layout == "tp") return Shard(i % 2);
  throw std::invalid_argument(fmt::format("\"{}\" is none of dp, zero, tp", layout));
}

// Holds a model of square parameters, of which checkpoint_peer.py makes the same, and AdamW's state for it.
struct StateCase {
  StateCase(const std::string& text, const DeviceMesh& on) : mesh(on) {
    std::string layout;
    int64_t megabytes = 0;
    std::istringstream in(text);
    if (!(in >> layout >> megabytes)) throw std::invalid_argument(fmt::format("\"{}\" is not LAYOUT MEGABYTES", text));
    const int64_t parameters = std::max<int64_t>(1, megabytes * 1'000'000 / (3 * kSide * kSide * 4));
    at::manual_seed(1);  // replicas are alike
    for (int64_t i = 0; i < parameters; ++i) {
      const at::Tensor weight = model.register_parameter(fmt::format("weight{:03}", i), at::rand({kSide, kSide}));
      distribute_in_place(weight, mesh, {placement_of(layout, i)}, kNoSource);
    }
    optimizer = std::make_unique<torch::optim::AdamW>(model.parameters(), torch::optim::AdamWOptions(1e-3));
    for (at::Tensor& weight : model.parameters()) weight.mutable_grad() = weight.detach() * 0.1;
    optimizer->step();
    for (const at::Tensor& weight : model.parameters())
      local_bytes += 3 * static_cast<int64_t>(to_local(weight).nbytes());
    share_bytes = 3 * parameters * kSide * kSide * 4 / mesh.size();
  }

  TrainingState state() { return {.mesh = mesh, .model = model, .optimizer = optimizer.get(), .step = ++step}; }

  // Returns what this rank holds of the state.
  std::vector<at::Tensor> pieces() {
    std::vector<at::Tensor> out;
    for (const at::Tensor& weight : model.parameters()) {
      const auto& moments =
          static_cast<const torch::optim::AdamWParamState&>(*optimizer->state().at(weight.unsafeGetTensorImpl()));
      for (const at::Tensor& tensor : {weight, moments.exp_avg(), moments.exp_avg_sq()}) {
        out.push_back(to_local(tensor).detach());
      }
    }
    return out;
  }

  // Copies the same part of each piece, share_bytes in all.
  void copy_to(char* to) {
    for (const at::Tensor& piece : pieces()) {
      const auto bytes = static_cast<std::size_t>(static_cast<int64_t>(piece.nbytes()) * share_bytes / local_bytes);
      std::memcpy(to, piece.const_data_ptr(), bytes);
      to += bytes;
    }
  }

  // Returns a number that follows from all values and from the order of the tensors.
  double digest() {
    double out = 0;
    for (const at::Tensor& piece : pieces()) out = out / 2 + piece.sum(at::kDouble).item<double>();
    return out;
  }

  const DeviceMesh mesh;
  torch::nn::Module model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  int64_t local_bytes = 0;  // of all tensors that this rank holds
  int64_t share_bytes = 0;  // of the state, over the ranks
  int64_t step = 0;
  std::unique_ptr<TrainingStateSaver> saver;
  std::unique_ptr<char[]> touched;
};

void start(StateCase& at, const std::string& folder, bool fresh) {
  if (fresh || !at.saver) at.saver = std::make_unique<TrainingStateSaver>(folder, SaveStateOptions{.keep = 1});
  at.saver->start(at.state());
}

double copy(StateCase& at, const std::string& kind) {
  const auto bytes = static_cast<std::size_t>(at.share_bytes);
  std::unique_ptr<char[]> fresh;
  if (kind == "touched" && !at.touched) {
    at.touched.reset(new char[bytes]);
    at.copy_to(at.touched.get());
    if (at.mesh.size() > 1) barrier(at.mesh, 0);
  }
  return microseconds_of([&] {
    if (kind != "touched") fresh.reset(new char[bytes]);
    at.copy_to(kind == "touched" ? at.touched.get() : fresh.get());
  });
}

int64_t peak(StateCase& at, const std::string& folder) {
  restart_peak();
  start(at, folder, /*fresh=*/true);
  at.saver->wait();
  return peak_bytes();
}

double timed(StateCase& at, const std::string& what, const std::string& rest) {
  if (what == "copy") return copy(at, rest);
  return microseconds_of([&] {
    if (what == "save") {
      save_training_state(at.state(), rest, {.keep = 1});
    } else if (what == "load") {
      TrainingState state = at.state();
      if (!load_newest_training_state(state, rest)) throw std::runtime_error("there is no state");
    } else if (what == "start" || what == "fresh") {
      start(at, rest, what == "fresh");
    } else if (what == "spoil") {
      for (const at::Tensor& piece : at.pieces()) piece.zero_();
    } else if (what == "wait") {
      at.saver->wait();
    } else if (what == "steps") {
      for (int i = 0; i < std::stoi(rest); ++i) at.optimizer->step();
    } else {
      throw std::invalid_argument(fmt::format("there is no command \"{}\"", what));
    }
  });
}

}  // namespace

void serve_checkpoint(const std::string& socket) {
  at::set_num_threads(1);
  restart_peak();
  const auto world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"all"}, world);
  std::unique_ptr<StateCase> made;
  serve(socket, *world, [&](const std::string& what, const std::string& rest) {
    if (what == "case") {
      made.reset();
      made = std::make_unique<StateCase>(rest, mesh);
      return fmt::format("{}", made->share_bytes);
    }
    if (what == "held") return fmt::format("{}", allocated_bytes());
    // The peer too removes what it saved before, and does not time it.
    const bool saves = what == "save" || what == "start" || what == "fresh";
    if (saves && world->rank() == 0) std::filesystem::remove_all(rest);
    if (mesh.size() > 1) barrier(mesh, 0);
    if (what == "peak") return fmt::format("{}", peak(*made, rest));
    if (what == "digest") return fmt::format("{}", made->digest());
    return fmt::format("{}", timed(*made, what, rest));
  });
}

}  // namespace tessera::bench
