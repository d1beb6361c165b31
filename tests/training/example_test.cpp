// Runs examples/train as a user does, on four ranks. A run that was resumed is compared with one that did not stop, and
// losses are compared with those of the plain model in one process.

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>

#include "tessera/examples/train/sequences.h"
#include "tessera/examples/train/transformer.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using tessera::testing::shell;
using tessera::testing::ShellOutcome;

ShellOutcome train(const std::string& arguments) {
  return shell("timeout 120 tools/launcher/launch --no-prefix -n 4 examples/train/train " + arguments);
}

std::string output_of(const std::string& arguments) {
  const ShellOutcome outcome = train(arguments);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  return outcome.output;
}

std::vector<double> losses_in(const std::string& output) {
  const std::string before = " loss ";
  std::vector<double> losses;
  for (auto at = output.find(before); at != std::string::npos; at = output.find(before, at + 1)) {
    losses.push_back(std::stod(output.substr(at + before.size())));
  }
  return losses;
}

using Batches = std::vector<torch::data::Example<>>;

// Returns the batches that one of two data ranks gets in the first epoch.
Batches batches_of(std::size_t data_rank) {
  torch::data::samplers::DistributedRandomSampler sampler(*Sequences().size(), 2, data_rank);
  sampler.set_epoch(0);
  const auto loader = torch::data::make_data_loader(Sequences().map(torch::data::transforms::Stack<>()), sampler, 8);
  return {loader->begin(), loader->end()};
}

// Trains the plain model on the batches of both data ranks together, and returns the losses.
std::vector<double> losses_of_plain_model() {
  torch::manual_seed(1);
  Transformer model(/*dropout=*/0.0);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3).weight_decay(0.01));
  const Batches first = batches_of(0), second = batches_of(1);
  std::vector<double> losses;
  for (std::size_t i = 0; i < first.size(); ++i) {
    const at::Tensor ids = torch::cat({first[i].data, second[i].data});
    const at::Tensor target = torch::cat({first[i].target, second[i].target});
    optimizer.zero_grad();
    const at::Tensor loss = torch::cross_entropy_loss(model(ids).flatten(0, 1), target.flatten());
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

TEST_CASE("examples/train: a run that was resumed prints the losses of a run that did not stop, to the last digit") {
  const tessera::PrivateFolder folder;
  const std::string whole = output_of(folder.path() + "/whole 3");
  const std::string begun = output_of(folder.path() + "/parts 1");
  CHECK(begun + output_of(folder.path() + "/parts 3 --resume") == whole);
  const std::vector<double> losses = losses_in(whole);
  REQUIRE(losses.size() == 18);
  CHECK(losses.back() < losses.front());
}

TEST_CASE("examples/train: on {dp: 2, tp: 2} the losses are those of the plain model in one process, in float64") {
  const tessera::PrivateFolder folder;
  const std::vector<double> got = losses_in(output_of(folder.path() + "/run 1 --float64 --dropout 0"));
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const std::vector<double> want = losses_of_plain_model();
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  REQUIRE(want.size() == 6);
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CHECK(got[i] == doctest::Approx(want[i]).epsilon(1e-10));
  }
}

TEST_CASE("examples/train: a folder that has a run is not overwritten, and a mistyped option is named") {
  const tessera::PrivateFolder folder;
  output_of(folder.path() + " 1");
  const ShellOutcome again = train(folder.path() + " 1"), mistyped = train(folder.path() + " 1 --resum");
  CHECK(again.exit_code == 1);
  CHECK(again.output.find("has a run; give --resume") != std::string::npos);
  CHECK(mistyped.exit_code == 1);
  CHECK(mistyped.output.find("does not know the argument --resum") != std::string::npos);
}
