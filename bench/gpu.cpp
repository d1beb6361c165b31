// Measures on one GPU, all or one of four parts:
//   block    a transformer block's step, and its parts, the module under a tensor-parallel plan on a mesh of one rank
//            beside the same module as it is: where nothing is communicated, a plan costs the CPU's time to queue the
//            work, and whatever waits for the GPU. With --device cpu the block is so small that there is little else
//   draws    filling large tensors with random numbers, DTensors beside plain tensors
//   kernels  the other kernels of our own beside LibTorch's operators
//   files    reading and writing files, beside copies of pinned memory

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <CLI/CLI.hpp>

#include "tessera/bench/block.h"
#include "tessera/bench/gpu_compare.h"
#include "tessera/bench/gpu_io.h"
#include "tessera/bench/gpu_kernels.h"
#include "tessera/bench/measure.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/styles/parallelize.h"

namespace {

using tessera::bench::BlockSize;
using tessera::bench::compare;
using tessera::bench::Compared;
using Block = tessera::bench::BlockOf<torch::nn::Linear, torch::nn::Linear>;

// One side: a block, its input, and two optimizers of its parameters.
struct Side {
  std::shared_ptr<Block> block;
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::unique_ptr<torch::optim::AdamW> adamw;
  std::unique_ptr<tessera::FusedAdamW> fused;
  at::Tensor x;

  void forward_and_backward() const {
    block->zero_grad();
    forward(x).square().mean().backward();
  }
};

std::shared_ptr<Block> make_block(const BlockSize& size, const at::TensorOptions& options) {
  const auto linear = [](int64_t in, int64_t out) { return torch::nn::Linear(in, out); };
  auto block = std::make_shared<Block>(size, linear(size.hidden, 3 * size.hidden), linear(size.hidden, size.hidden),
                                       linear(size.hidden, 4 * size.hidden), linear(4 * size.hidden, size.hidden));
  block->to(options.device(), c10::typeMetaToScalarType(options.dtype()));
  return block;
}

Side make_side(const BlockSize& size, const at::TensorOptions& options, const tessera::DeviceMesh* mesh) {
  Side side{.block = make_block(size, options), .forward = {}, .adamw = nullptr, .fused = nullptr, .x = {}};
  if (mesh == nullptr) {
    side.forward = [block = side.block](const at::Tensor& x) { return block->forward(x); };
  } else {
    auto parallel = tessera::parallelize_module(side.block, *mesh,
                                                {{"qkv", tessera::ColwiseParallel()},
                                                 {"out", tessera::RowwiseParallel()},
                                                 {"up", tessera::ColwiseParallel()},
                                                 {"down", tessera::RowwiseParallel()}});
    side.forward = [parallel](const at::Tensor& x) mutable { return parallel(x); };
  }
  side.adamw = std::make_unique<torch::optim::AdamW>(side.block->parameters());
  side.fused = std::make_unique<tessera::FusedAdamW>(side.block->parameters());
  side.x = tessera::bench::numbers({size.sequence, size.batch, size.hidden}, 1, 1).to(options);
  return side;
}

void measure_block_of(const BlockSize& size, const std::string& device, at::ScalarType dtype, int rounds, int steps) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh(device, {1}, {"tp"}, tessera::World::create({}));
  const at::TensorOptions options = at::TensorOptions(dtype).device(mesh.device());
  const Side ours = make_side(size, options, &mesh), plain = make_side(size, options, nullptr);
  const int fewer = size.hidden >= 4096 ? std::max(steps / 10, 1) : steps;  // these take long, and vary little
  const auto row = [&](const char* name, const std::function<void(const Side&)>& part) {
    const Compared found = compare(
        mesh.device(), rounds, fewer, [&] { part(ours); }, [&] { part(plain); });
    fmt::print("{:<10}{:>8}{:>10}{:>8}  {:<24}{:>12.1f}{:>12.1f}{:>9.3f}  {:.3f}-{:.3f}\n", c10::toString(dtype),
               size.hidden, size.sequence, size.batch, name, found.ours.median, found.plain.median, found.ratio.median,
               found.ratio.low, found.ratio.high);
    std::cout.flush();
  };
  row("a step with AdamW", [](const Side& side) {
    side.forward_and_backward();
    side.adamw->step();
  });
  row("a step with FusedAdamW", [](const Side& side) {
    side.forward_and_backward();
    side.fused->step();
  });
  row("forward and backward", [](const Side& side) { side.forward_and_backward(); });
  row("AdamW", [](const Side& side) { side.adamw->step(); });
  row("FusedAdamW", [](const Side& side) { side.fused->step(); });
}

void measure_block(const std::string& device, int rounds, int steps) {
  fmt::print("{:<10}{:>8}{:>10}{:>8}  {:<24}{:>12}{:>12}{:>9}  {}\n", "dtype", "hidden", "sequence", "batch", "",
             "ours, us", "plain, us", "ratio", "quartiles");
  const std::vector<BlockSize> small = {{.hidden = 16, .sequence = 4, .batch = 1, .heads = 2}};
  const std::vector<BlockSize> large = {{.hidden = 256, .sequence = 128, .batch = 1, .heads = 4},
                                        {.hidden = 1024, .sequence = 512, .batch = 4, .heads = 16},
                                        {.hidden = 4096, .sequence = 1024, .batch = 4, .heads = 32}};
  for (const BlockSize& size : device == "cpu" ? small : large) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) measure_block_of(size, device, dtype, rounds, steps);
  }
}

// Fills tensors of 2^28 elements (on the CPU 2^20).
void measure_draws(const std::string& device, int rounds) {
  fmt::print("{:<32}{:>12}{:>12}{:>9}\n", "random numbers", "ours, us", "plain, us", "ratio");
  const tessera::DeviceMesh mesh = tessera::init_device_mesh(device, {1}, {"tp"}, tessera::World::create({}));
  const int64_t count = int64_t{1} << (device == "cpu" ? 20 : 28);
  const at::NoGradGuard no_grad;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor plain = at::zeros({count}, at::TensorOptions(dtype).device(mesh.device()));
    const at::Tensor ours = tessera::from_local(plain.clone(), mesh, {tessera::Shard(0)});
    const auto row = [&](const char* name, const std::function<void(const at::Tensor&)>& fill) {
      constexpr int kCalls = 5;
      const Compared found = compare(
          mesh.device(), rounds, kCalls, [&] { fill(ours); }, [&] { fill(plain); });
      fmt::print("{:<32}{:>12.1f}{:>12.1f}{:>9.3f}\n", fmt::format("{} {}", name, c10::toString(dtype)),
                 found.ours.median, found.plain.median, found.ratio.median);
    };
    row("uniform_", [](const at::Tensor& t) { t.uniform_(); });
    row("normal_", [](const at::Tensor& t) { t.normal_(); });
    row("bernoulli_", [](const at::Tensor& t) { t.bernoulli_(0.9); });
    row("dropout", [](const at::Tensor& t) { (void)at::dropout(t, 0.1, true); });
  }
}

void measure_files(const std::string& device, int rounds) {
  fmt::print("{:<32}{:>12}{:>12}{:>9}\n", "files", "ours, GB/s", "copy, GB/s", "ratio");
  const c10::Device at(device);
  tessera::bench::measure_io(at.is_cpu() ? at : c10::Device(at.type(), 0), rounds);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A plan on one GPU, random numbers, kernels and files, each beside its peer");
  std::string device = "cuda", only;
  int rounds = 15, steps = 20;
  const std::map<std::string, std::function<void()>> parts = {
      {"block", [&] { measure_block(device, rounds, steps); }},
      {"draws", [&] { measure_draws(device, rounds); }},
      {"files", [&] { measure_files(device, rounds); }},
      {"kernels", [&] { tessera::bench::measure_kernels(device, rounds); }},
  };
  app.add_option("--device", device, "cpu or cuda");
  app.add_option("--only", only, "one part")->check(CLI::IsMember(parts));
  app.add_option("--rounds", rounds, "interleaved rounds")->check(CLI::PositiveNumber);
  app.add_option("--steps", steps, "steps per round of the block")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  try {
    for (const auto& [name, measure] : parts) {
      if (!only.empty() && only != name) continue;
      measure();
      std::cout << std::endl;
    }
  } catch (const std::exception& error) {
    std::cerr << "gpu: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
