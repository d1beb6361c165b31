// Trains random nets by random placements and styles on random meshes, and compares results, gradients, parameters and
// buffers with one process: modules meet in combinations that nobody would write down. TESSERA_RANDOM_RUNS=N tries N.

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tessera.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/modules/random_net.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr double kTolerance = 1e-8;

DeviceMesh random_mesh(Random& random) {
  const int64_t n = world()->size();
  std::vector<std::pair<std::vector<int64_t>, std::vector<std::string>>> all = {
      {{n}, {"tp"}}, {{n}, {"dp"}}, {{n, 1}, {"dp", "tp"}}, {{1, n}, {"dp", "tp"}}};
  if (n == 4) all.insert(all.end(), 2, {{2, 2}, {"dp", "tp"}});
  const auto& [shape, names] = all[static_cast<std::size_t>(pick(random, std::ssize(all)))];
  return init_device_mesh(device_name(), shape, names, world());
}

bool has_dim(const DeviceMesh& mesh, const std::string& name) {
  return std::ranges::find(mesh.mesh().names(), name) != mesh.mesh().names().end();
}

Placement random_cut(Random& random, int64_t ndim) {
  return chance(random, 3) ? Placement(Replicate()) : Shard(pick(random, ndim));
}

Style style_of_linear(Random& random) {
  switch (pick(random, 4)) {
    case 0: return ColwiseParallel();
    case 1: return ColwiseParallel({.output_layouts = Replicate()});
    case 2: return RowwiseParallel({.input_layouts = Replicate()});
    default: return RowwiseParallel({.input_layouts = Replicate(), .output_layouts = Shard(0)});
  }
}

// Gives about two thirds of the modules a style, or their parameters random cuts.
ParallelPlan random_plan(const RandomNetImpl& net, Random& random) {
  ParallelPlan out;
  for (const auto& item : net.named_modules("", /*include_self=*/false)) {
    const torch::nn::Module& module = *item.value();
    if (chance(random, 3) || item.key().ends_with("out_proj")) continue;
    if (module.as<torch::nn::MultiheadAttention>() != nullptr) {
      out.emplace_back(item.key(), ColwiseParallel());
    } else if (module.as<torch::nn::Linear>() != nullptr && chance(random, 2)) {
      out.emplace_back(item.key(), style_of_linear(random));
    } else if (PlaceParameters::Named named; !module.parameters(/*recurse=*/false).empty()) {
      for (const auto& p : module.named_parameters(/*recurse=*/false)) {
        named.emplace_back(p.key(), random_cut(random, p.value().dim()));
      }
      out.emplace_back(item.key(), PlaceParameters(named));
    }
  }
  return out;
}

// Holds a net that is laid out on a mesh, and its twin in this process.
class Run {
 public:
  explicit Run(unsigned seed) : random_(seed + 1), mesh_(random_mesh(random_)), want_(seed), got_(seed) {
    ParallelizeOptions options;
    ParallelPlan plan;
    if (has_dim(mesh_, "tp")) plan = random_plan(*got_, random_);
    if (has_dim(mesh_, "dp") && chance(random_, 2)) {
      options.data_placement = Shard(0);
      options.zero_stage = 1 + pick(random_, 3);
    }
    if (chance(random_, 2)) options.gradient_buckets.bucket_bytes = 500 * pick(random_, 2);
    for (const std::string& name : mesh_.mesh().names()) {
      input_.push_back(name == "dp" ? Placement(Shard(0)) : random_cut(random_, std::ssize(got_->input.sizes())));
    }
    history_ = fmt::format("{}, input {},{} ZeRO {}, plan\n{}", mesh_.to_string(), to_string(input_), got_->text,
                           options.data_placement ? options.zero_stage : 0, to_string(plan));
    parallel_.emplace(parallelize_module(got_, mesh_, plan, options));
  }

  void train() {
    CAPTURE(history_);
    const auto options = torch::optim::AdamWOptions(0.01).eps(1e-3);
    torch::optim::AdamW ours(got_->parameters(), options), theirs(want_->parameters(), options);
    const bool trains = !chance(random_, 5);
    got_->train(trains);
    want_->train(trains);
    for (int64_t step = 0; step < 2; ++step) {
      CAPTURE(step);
      ours.zero_grad();
      theirs.zero_grad();
      backward(sample(got_->input.sizes(), step));
      ours.step();
      theirs.step();
      compare(/*gradients=*/false);
    }
  }

 private:
  void backward(const at::Tensor& whole) {
    const at::Tensor x = leaf(whole), ours = leaf(whole, mesh_, input_);
    const at::Tensor want = want_->forward(x), got = (*parallel_)(ours);
    CHECK(close(full_tensor(got.detach()), want.detach(), kTolerance));
    (want.square().mean() + want.sin().sum()).backward();
    (got.square().mean() + got.sin().sum()).backward();
    CHECK(close(full_tensor(ours.grad().detach()), x.grad(), kTolerance));
    compare(/*gradients=*/true);
  }

  // Compares parameters or their gradients, of which one may be missing where the other is zero, and buffers.
  void compare(bool gradients) const {
    const torch::NoGradGuard no_grad;
    const auto parameters = want_->named_parameters(), buffers = want_->named_buffers();
    const auto whole = [](const at::Tensor& t) { return is_dtensor(t) ? full_tensor(t.detach()) : t.detach(); };
    for (const auto& item : got_->named_parameters()) {
      CAPTURE(item.key());
      const at::Tensor& expected = parameters[item.key()];
      const at::Tensor a = gradients ? item.value().grad() : item.value(), b = gradients ? expected.grad() : expected;
      const at::Tensor zero = at::zeros_like(expected);
      CHECK(close(a.defined() ? whole(a) : zero, b.defined() ? b.detach() : zero, kTolerance));
    }
    for (const auto& item : got_->named_buffers()) {
      CAPTURE(item.key());
      if (item.value().defined()) CHECK(close(whole(item.value()), buffers[item.key()], kTolerance));
    }
  }

  Random random_;
  const DeviceMesh mesh_;
  RandomNet want_, got_;
  Placements input_;
  std::string history_;  // for messages
  std::optional<Parallelized<RandomNet>> parallel_;
};

}  // namespace

TESSERA_RANKS_TEST_CASE("random nets of modules train as in one process",
                        Ranks({1, 2, 3, 4}).time_limit(std::chrono::minutes(30))) {
  for (unsigned seed = 0; seed < random_runs(40); ++seed) {
    CAPTURE(seed);
    Run(seed).train();
  }
}
