// The trainer on meshes, compared with itself on one rank and with a loop of LibTorch alone, in float64.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>

#include "tessera/dtensor/data/global_batches.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/examples/train/comparison.h"
#include "tessera/examples/train/dry_run.h"
#include "tessera/examples/train/trainer.h"
#include "tessera/examples/train/windows.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/ranks.h"

namespace {

using tessera::DeviceMesh;
using tessera::GlobalBatches;
using train::Options;
using train::Trainer;
using train::Windows;

// Returns text in which each byte depends on those before it.
std::string text_of(int64_t bytes) {
  std::string text;
  uint64_t state = 1;
  while (static_cast<int64_t>(text.size()) < bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    for (uint64_t i = 0; i <= state >> 61; ++i) text += static_cast<char>('a' + (state >> 50) % 5 + i);
    text += ' ';
  }
  return text;
}

const Windows& windows() {
  static const Windows windows(text_of(3000), 12);
  return windows;
}

Options small(int64_t dp, int64_t tp) {
  Options options;
  options.dp = dp;
  options.tp = tp;
  options.hidden = 16;
  options.layers = 1;
  options.heads = 4;
  options.sequence = 12;
  options.batch = 8;
  options.dtype = "float64";
  options.warm_up = 5;
  return options;
}

DeviceMesh mesh_of(const Options& options) {
  return tessera::init_device_mesh("cpu", {options.dp, options.tp}, {"dp", "tp"}, tessera::testing::world());
}

DeviceMesh one_rank() { return tessera::init_device_mesh("cpu", {1, 1}, {"dp", "tp"}, tessera::World::create({})); }

// Trains as the program does, written anew with LibTorch alone.
std::vector<double> losses_of_libtorch(const Options& options) {
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  Transformer model(TransformerOptions{.hidden = options.hidden,
                                       .layers = options.layers,
                                       .heads = options.heads,
                                       .sequence = options.sequence,
                                       .dropout = 0.0,
                                       .tied = options.is_tied});
  model->to(torch::kDouble);
  std::vector<at::Tensor> matrices, others;
  for (const at::Tensor& each : model->parameters()) (each.dim() >= 2 ? matrices : others).push_back(each);
  const auto settings = [](double decay) {
    return torch::optim::AdamWOptions().betas({0.9, 0.95}).weight_decay(decay);
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<torch::optim::AdamWOptions>(settings(options.weight_decay)));
  groups.emplace_back(others, std::make_unique<torch::optim::AdamWOptions>(settings(0.0)));
  torch::optim::AdamW optimizer(groups, settings(0.0));
  const GlobalBatches batches(windows().size(), options.batch, static_cast<uint64_t>(options.seed));
  std::vector<double> losses;
  for (int64_t step = 0; step < options.check_steps; ++step) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(train::learning_rate_of(options, step));
    const auto [ids, targets] = windows().batch(batches.of_step(step));
    optimizer.zero_grad();
    const at::Tensor loss = torch::cross_entropy_loss(model(ids).flatten(0, 1), targets.flatten());
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), options.clip);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// Returns NaN where a difference is NaN.
double largest_difference(const std::vector<double>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(got[i] - want[i]);
    if (std::isnan(difference)) return difference;
    largest = std::max(largest, difference);
  }
  return largest;
}

// Compares 20 steps on a mesh: with dropout, and without.
void check_losses(Options options) {
  const std::vector<double> drawn = train::losses_of(options, windows(), mesh_of(options));
  const std::vector<double> alone = train::losses_of(options, windows(), one_rank());
  CHECK(largest_difference(drawn, alone) <= 1e-9);
  CHECK(drawn.back() < drawn.front() - 0.5);
  options.dropout = 0.0;
  const std::vector<double> exact = train::losses_of(options, windows(), mesh_of(options));
  CHECK(largest_difference(exact, losses_of_libtorch(options)) <= 1e-9);
  CHECK(largest_difference(exact, drawn) > 1e-3);  // dropout was on
}

}  // namespace

TESSERA_RANKS_TEST_CASE("train: on 4 ranks the losses of 20 steps are those of one rank, and of LibTorch alone",
                        tessera::testing::Ranks({4}).time_limit(std::chrono::seconds(500))) {
  SUBCASE("dp=4") { check_losses(small(4, 1)); }
  SUBCASE("tp=4") { check_losses(small(1, 4)); }
  SUBCASE("dp=2,tp=2") {
    Options options = small(2, 2);
    options.layers = 2;
    check_losses(options);
  }
  SUBCASE("--zero") {
    Options options = small(2, 2);
    options.zero = 3;
    check_losses(options);
  }
  SUBCASE("--accumulate 2") {
    Options options = small(2, 2);
    options.accumulate = 2;
    check_losses(options);
  }
  SUBCASE("--activation-checkpoint --tied") {
    Options options = small(2, 2);
    options.has_activation_checkpoints = options.is_tied = true;
    check_losses(options);
  }
  SUBCASE("everything at once, and a batch that dp does not divide") {
    Options options = small(4, 1);
    options.zero = 3;
    options.batch = 6;
    options.accumulate = 2;
    options.has_activation_checkpoints = options.is_tied = true;
    check_losses(options);
  }
}

TESSERA_RANKS_TEST_CASE("train: on 1, 2 and 3 ranks too, where heads, features and samples do not divide evenly",
                        tessera::testing::Ranks({1, 2, 3}).time_limit(std::chrono::seconds(300))) {
  const int64_t ranks = tessera::testing::world_size();
  check_losses(small(ranks, 1));
  check_losses(small(1, ranks));
}

TESSERA_RANKS_TEST_CASE("train: a step whose loss is not finite names itself and leaves the parameters", {2}) {
  const Options options = small(1, 2);
  Trainer trainer(options, mesh_of(options));
  const GlobalBatches batches(windows().size(), options.batch, 1);
  trainer.step(windows(), batches, 0);
  {
    const torch::NoGradGuard no_gradient;
    trainer.module().named_parameters()["head.weight"].fill_(std::numeric_limits<double>::quiet_NaN());
  }
  const at::Tensor before = tessera::full_tensor(trainer.module().named_parameters()["layers.0.mlp.up.weight"]).clone();
  CHECK_THROWS_WITH_AS(trainer.step(windows(), batches, 1), doctest::Contains("step 2 has the loss nan"),
                       std::runtime_error);
  CHECK(torch::equal(tessera::full_tensor(trainer.module().named_parameters()["layers.0.mlp.up.weight"]), before));
}

TESSERA_RANKS_TEST_CASE("train: a dry run counts the collectives of a real step", {4}) {
  Options options = small(2, 2);
  SUBCASE("plain") {}
  SUBCASE("--zero --accumulate 2") {
    options.zero = 3;
    options.accumulate = 2;
  }
  const DeviceMesh mesh = mesh_of(options);
  Trainer trainer(options, mesh);
  const GlobalBatches batches(windows().size(), options.batch, 1);
  // In the first two, the order of gradients and of gathered parameters is learned.
  for (int64_t step = 0; step < 2; ++step) trainer.step(windows(), batches, step);
  const tessera::CommCounter counter(mesh);
  trainer.step(windows(), batches, 2);
  if (tessera::testing::world()->rank() == 0) {
    const std::string text = train::dry_run(options);
    CAPTURE(text);
    const std::string want = "collectives of a step: " + std::to_string(counter.total()) + " of ";
    CAPTURE(want);
    CHECK(text.find(want) != std::string::npos);
    CHECK(text.find("rank 3 ") != std::string::npos);
  }
}

TESSERA_RANKS_TEST_CASE("train: held-out text and written text are the same on a mesh as in LibTorch alone",
                        {1, 3, 4}) {
  const int64_t ranks = tessera::testing::world_size();
  const Options options = ranks == 4 ? small(2, 2) : small(1, ranks);
  Trainer trainer(options, mesh_of(options)), alone(options, std::nullopt);
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < 67; ++i) samples.push_back(i * 3);
  const double want = alone.bits_per_byte(windows(), samples);
  CHECK(trainer.bits_per_byte(windows(), samples) == doctest::Approx(want).epsilon(1e-10));
  const std::string written = trainer.write("ab", 30, 0.8, 5);
  CHECK(written.size() == 30);
  CHECK(written == alone.write("ab", 30, 0.8, 5));
}

TEST_CASE("train: the learning rate rises, then falls along a cosine to a tenth") {
  Options options;
  options.learning_rate = 1;
  options.warm_up = 4;
  options.steps = 104;
  CHECK(train::learning_rate_of(options, 0) == doctest::Approx(0.25));
  CHECK(train::learning_rate_of(options, 3) == doctest::Approx(1));
  CHECK(train::learning_rate_of(options, 54) == doctest::Approx(0.55));
  CHECK(train::learning_rate_of(options, 104) == doctest::Approx(0.1));
}

TEST_CASE("train: windows cover a text, each byte but the first as a target once") {
  const Windows three("abcdefghi", 3);
  CHECK(three.size() == 2);
  const auto [ids, targets] = three.batch({1, 0});
  CHECK(torch::equal(ids, torch::tensor({{'d', 'e', 'f'}, {'a', 'b', 'c'}}, torch::kLong)));
  CHECK(torch::equal(targets, torch::tensor({{'e', 'f', 'g'}, {'b', 'c', 'd'}}, torch::kLong)));
  CHECK(three.batch({}).first.sizes() == at::IntArrayRef({0, 3}));
  CHECK(Windows("abcdefg", 3).size() == 2);
  CHECK_THROWS_WITH_AS(Windows("abc", 3), doctest::Contains("has no sample of 3 bytes"), std::invalid_argument);
}
