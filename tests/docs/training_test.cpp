// Holds the code of docs/training.md, and compares what it trains with one process.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/parallel_dim.h"  // vocab_parallel_cross_entropy
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/ranks.h"

namespace {

constexpr int64_t kWords = 12;

struct NextWordImpl : torch::nn::Module {
  explicit NextWordImpl(double dropout) {
    embed = register_module("embed", torch::nn::Embedding(kWords, 8));
    up = register_module("up", torch::nn::Linear(8, 32));
    drop = register_module("drop", torch::nn::Dropout(dropout));
    down = register_module("down", torch::nn::Linear(32, 8));
    head = register_module("head", torch::nn::Linear(8, kWords));
  }
  at::Tensor forward(const at::Tensor& ids) {  // [batch, length] -> [batch, length, kWords]
    const at::Tensor x = embed(ids);
    return head(x + down(drop(torch::gelu(up(x)))));
  }

  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(NextWord);

struct Sentences : torch::data::datasets::Dataset<Sentences> {
  torch::data::Example<> get(std::size_t index) override {
    const at::Tensor words = (torch::arange(6) * 5 + static_cast<int64_t>(index) * 7) % kWords;
    return {words.slice(0, 0, 5), words.slice(0, 1, 6)};  // each word, and the word that follows it
  }
  std::optional<std::size_t> size() const override { return 7; }
};

struct Job {
  int64_t dp, tp;
  double dropout = 0;
  std::size_t epochs = 4;
  uint64_t seed = 0;
  std::string folder;  // of its training states, or empty
};

struct Result {
  std::vector<double> losses;
  std::vector<at::Tensor> parameters;  // whole and plain
};

// Is the training of docs/training.md.
Result train(const Job& job) {
  Result result;
  std::vector<double>& losses = result.losses;
  Sentences sentences;
  const double dropout = job.dropout;
  const uint64_t seed = job.seed;

  const auto world = tessera::World::from_environment();  // this process's place in the job
  const int64_t dp = world->size() % 2 == 0 ? 2 : 1, tp = world->size() / dp;
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {dp, tp}, {"dp", "tp"}, world);

  torch::manual_seed(seed);            // the first values of the parameters
  tessera::manual_seed(seed, *world);  // dropout
  NextWord model(dropout);
  auto parallel = tessera::parallelize_module(
      model, mesh,
      {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}, {"head", tessera::ColwiseParallel()}});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/2, /*gamma=*/0.5);

  const std::string& folder = job.folder;
  tessera::TrainingState state = {
      .mesh = mesh, .model = *model, .optimizer = &optimizer, .scheduler = &scheduler, .step = 0};
  tessera::load_newest_training_state(state, folder);  // if there is one: a new run begins with epoch 0
  const auto first = static_cast<std::size_t>(state.step);
  for (std::size_t epoch = first; epoch < job.epochs; ++epoch) {
    torch::data::samplers::DistributedRandomSampler sampler(
        *sentences.size(), static_cast<std::size_t>(mesh.size("dp")), static_cast<std::size_t>(mesh.local_rank("dp")));
    sampler.set_epoch(epoch);
    const auto loader =
        torch::data::make_data_loader(sentences.map(torch::data::transforms::Stack<>()), sampler, /*batch_size=*/3);
    for (const torch::data::Example<>& batch : *loader) {
      const at::Tensor ids = tessera::from_local(batch.data, mesh, {tessera::Shard(0), tessera::Replicate()});
      const at::Tensor target = tessera::from_local(batch.target, mesh, {tessera::Shard(0), tessera::Replicate()});
      optimizer.zero_grad();
      const at::Tensor loss = torch::cross_entropy_loss(parallel(ids).flatten(0, 1), target.flatten());
      loss.backward();
      tessera::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      losses.push_back(loss.item<double>());  // one all-reduce: every rank calls it
      if (world->rank() == 0) std::cout << "loss " << losses.back() << std::endl;
    }
    scheduler.step();
    if (folder.empty()) continue;
    state.step = static_cast<int64_t>(epoch) + 1;
    tessera::save_training_state(state, folder, {.keep = 3});
  }
  for (const at::Tensor& parameter : model->parameters()) {
    result.parameters.push_back(tessera::full_tensor(parameter.detach()));
  }
  return result;
}

using Batches = std::vector<torch::data::Example<>>;

// Returns the batches that data rank `index` of `dp` gets in an epoch.
Batches batches_of(int64_t dp, int64_t index, std::size_t epoch) {
  torch::data::samplers::DistributedRandomSampler sampler(7, static_cast<std::size_t>(dp),
                                                          static_cast<std::size_t>(index));
  sampler.set_epoch(epoch);
  const auto loader = torch::data::make_data_loader(Sentences().map(torch::data::transforms::Stack<>()), sampler, 3);
  return {loader->begin(), loader->end()};
}

// Does the same as train() in this process alone, on the batches of all data ranks together.
Result train_alone(const Job& job) {
  Result result;
  torch::manual_seed(0);
  NextWord model(job.dropout);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  for (std::size_t epoch = 0; epoch < job.epochs; ++epoch) {
    std::vector<Batches> all;
    for (int64_t i = 0; i < job.dp; ++i) all.push_back(batches_of(job.dp, i, epoch));
    for (std::size_t step = 0; step < all[0].size(); ++step) {
      std::vector<at::Tensor> ids, target;
      for (const Batches& batches : all) {
        ids.push_back(batches[step].data);
        target.push_back(batches[step].target);
      }
      optimizer.zero_grad();
      const at::Tensor logits = model(torch::cat(ids));
      const at::Tensor loss = torch::cross_entropy_loss(logits.flatten(0, 1), torch::cat(target).flatten());
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      result.losses.push_back(loss.item<double>());
    }
    scheduler.step();
  }
  for (const at::Tensor& parameter : model->parameters()) result.parameters.push_back(parameter.detach());
  return result;
}

// Returns a folder that the ranks of this case share.
std::string folder_of_all_ranks() {
  const std::filesystem::path store = tessera::testing::store_path();
  const std::filesystem::path folder = store.parent_path() / "checkpoint";
  std::filesystem::create_directories(folder);
  return folder;
}

// Says how the ranks of this test are split: two data ranks where their number is even.
Job job_of_this_world() {
  const int64_t size = tessera::testing::world_size();
  return size % 2 == 0 ? Job{.dp = 2, .tp = size / 2} : Job{.dp = 1, .tp = size};
}

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/training.md: the loop gives the losses and weights of one process", {1, 2, 3, 4}) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const auto world = tessera::testing::world();
  const Job job = job_of_this_world();
  const Result want = train_alone(job), got = train(job);
  REQUIRE(want.losses.size() == (job.dp == 2 ? 8 : 12));
  REQUIRE(got.losses.size() == want.losses.size());
  for (std::size_t i = 0; i < want.losses.size(); ++i) {
    CAPTURE(i);
    CHECK(got.losses[i] == doctest::Approx(want.losses[i]).epsilon(1e-10));
  }
  for (std::size_t i = 0; i < want.parameters.size(); ++i) {
    CAPTURE(i);
    CHECK(torch::allclose(got.parameters[i], want.parameters[i], 1e-9, 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("docs/training.md: a run that was resumed is the run that did not stop", {1, 2, 4}) {
  const auto world = tessera::testing::world();  // the three runs are parts of one job
  Job whole = job_of_this_world();
  whole.dropout = 0.5;
  whole.epochs = 6;
  whole.seed = 7;
  Job first = whole, second = whole;
  first.epochs = 3;
  first.folder = second.folder = folder_of_all_ranks() + "/states";
  second.seed = 99;
  const Result want = train(whole), begun = train(first), resumed = train(second);
  REQUIRE(begun.losses.size() + resumed.losses.size() == want.losses.size());
  CHECK(std::equal(begun.losses.begin(), begun.losses.end(), want.losses.begin()));
  CHECK(std::equal(resumed.losses.rbegin(), resumed.losses.rend(), want.losses.rbegin()));
  for (std::size_t i = 0; i < want.parameters.size(); ++i) {
    CAPTURE(i);
    CHECK(torch::equal(resumed.parameters[i], want.parameters[i]));
  }
}

namespace {

// Returns the gradients, whole and plain, that `backward` gives to a new model on the mesh.
template <class Backward>
std::vector<at::Tensor> gradients(const tessera::DeviceMesh& mesh, const Backward& backward) {
  torch::manual_seed(0);
  NextWord model(0.0);
  auto parallel = tessera::parallelize_module(model, mesh, {{"head", tessera::ColwiseParallel()}});
  backward(parallel);
  std::vector<at::Tensor> out;
  for (const at::Tensor& parameter : model->parameters()) out.push_back(tessera::full_tensor(parameter.grad()));
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/training.md: the mean over a part gives a gradient that is too large by dp", {1, 2, 4}) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const Job job = job_of_this_world();
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {job.dp, job.tp}, {"dp", "tp"});
  const torch::data::Example<> batch = batches_of(job.dp, mesh.local_rank("dp"), 0).front();
  const at::Tensor ids = tessera::from_local(batch.data, mesh, {tessera::Shard(0), tessera::Replicate()});
  const auto right = gradients(mesh, [&](auto& parallel) {
    const at::Tensor target = tessera::from_local(batch.target, mesh, {tessera::Shard(0), tessera::Replicate()});
    const at::Tensor logits = parallel(ids).flatten(0, 1);
    const doctest::Contains text(job.dp > 1 ? "to match target batch_size" : "a plain tensor");
    CHECK_THROWS_WITH(torch::cross_entropy_loss(logits, batch.target.flatten()), text);
    torch::cross_entropy_loss(logits, target.flatten()).backward();
  });
  const auto of_pieces = gradients(mesh, [&](auto& parallel) {
    const at::Tensor pieces = tessera::to_local(parallel(ids));  // this rank's sentences and words
    const at::Tensor each = tessera::vocab_parallel_cross_entropy(pieces, batch.target, mesh["tp"]);
    const at::Tensor loss = tessera::from_local(each, mesh, {tessera::Shard(0), tessera::Replicate()}).mean();
    loss.backward();
  });
  const auto of_means = gradients(mesh, [&](auto& parallel) {
    const at::Tensor pieces = tessera::to_local(parallel(ids));
    tessera::vocab_parallel_cross_entropy(pieces, batch.target, mesh["tp"]).mean().backward();
  });
  for (std::size_t i = 0; i < right.size(); ++i) {
    CAPTURE(i);
    CHECK(torch::allclose(of_pieces[i], right[i], 1e-9, 1e-12));
    CHECK(torch::allclose(of_means[i], right[i] * job.dp, 1e-9, 1e-12));
  }
}

namespace {

// Is the model of the page on {dp: 2, tp: 2}, with this rank's first batch.
struct OnFourRanks {
  tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
  NextWord model{0.0};
  tessera::Parallelized<NextWord> parallel = tessera::parallelize_module(
      model, mesh,
      {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}, {"head", tessera::ColwiseParallel()}});
  torch::data::Example<> batch = batches_of(2, mesh.local_rank("dp"), 0).front();
  at::Tensor ids = tessera::from_local(batch.data, mesh, {tessera::Shard(0), tessera::Replicate()});
  at::Tensor target = tessera::from_local(batch.target, mesh, {tessera::Shard(0), tessera::Replicate()});

  at::Tensor loss() { return torch::cross_entropy_loss(parallel(ids).flatten(0, 1), target.flatten()); }
};

// Returns how many collectives over dp reduce gradients in the backward of `loss`.
int64_t reductions(const tessera::DeviceMesh& mesh, const at::Tensor& loss) {
  const tessera::CommCounter counter(mesh);
  loss.backward();
  const auto is_one = [](const auto& record) { return record.op == "gradient" && record.mesh_dim == "dp"; };
  return std::count_if(counter.records().begin(), counter.records().end(), is_one);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/training.md: each backward reduces the gradients of all parameters at once", {4}) {
  OnFourRanks job;
  CHECK(reductions(job.mesh, job.loss()) == 1);
  CHECK(reductions(job.mesh, job.loss()) == 1);
  CHECK(reductions(job.mesh, job.loss() + job.loss()) == 1);
}

TESSERA_RANKS_TEST_CASE("docs/training.md: several batches, whose gradients are reduced once", {4}) {
  OnFourRanks job;
  auto& model = job.model;
  auto& mesh = job.mesh;
  job.loss().backward();
  std::vector<at::Tensor> whole;
  for (const at::Tensor& each : model->parameters()) whole.push_back(tessera::full_tensor(each.grad()));
  model->zero_grad();
  job.loss().backward();  // the second one begins with the exchange
  model->zero_grad();
  const std::vector<int> batches(3);
  const auto loss_of = [&](int) { return job.loss(); };
  const tessera::CommCounter counter(mesh);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    std::optional<tessera::AccumulateGradients> guard;
    if (i + 1 < batches.size()) guard.emplace(mesh);  // the last backward reduces the sum
    const at::Tensor loss = loss_of(batches[i]) / static_cast<int64_t>(batches.size());
    loss.backward();
  }
  CHECK(counter.count_by_op("gradient") == 1);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    CHECK(torch::allclose(tessera::full_tensor(model->parameters()[i].grad()), whole[i], 1e-5, 1e-6));
  }
}

TESSERA_RANKS_TEST_CASE("docs/training.md: clip_grad_norm_ all-reduces one number, and LibTorch's one per parameter",
                        {4}) {
  OnFourRanks job;
  job.loss().backward();
  const tessera::CommCounter counter(job.mesh);
  const double norm = tessera::clip_grad_norm_(job.model->parameters(), 1e6);
  CHECK(counter.count("all_reduce") == 1);
  CHECK(counter.total_bytes() == 8);
  CHECK(torch::nn::utils::clip_grad_norm_(job.model->parameters(), 1.0) == doctest::Approx(norm).epsilon(1e-5));
  CHECK(counter.count("all_reduce") == 1 + 5);  // weight and bias of up and head, weight of down
  CHECK(counter.total() == 1 + 5);
}

TESSERA_RANKS_TEST_CASE("docs/training.md: a scaled loss gives the same step", {4}) {
  torch::manual_seed(0);
  OnFourRanks with;
  torch::manual_seed(0);
  OnFourRanks without;
  {
    NextWord& model = with.model;
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const at::Tensor loss = with.loss();
    tessera::LossScaler scaler;  // made once
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);  // now, so that the norm is that of the gradients
    tessera::clip_grad_norm_(model->parameters(), 1.0);
    scaler.step(optimizer);  // returns whether it stepped
    scaler.update();
    CHECK(scaler.state() == tessera::LossScalerState{65536, 1});
    const tessera::DeviceMesh& mesh = with.mesh;
    tessera::TrainingState state{.mesh = mesh, .model = *model, .optimizer = &optimizer, .scaler = &scaler};
    CHECK(state.scaler == &scaler);
  }
  torch::optim::SGD optimizer(without.model->parameters(), 0.1);
  without.loss().backward();
  tessera::clip_grad_norm_(without.model->parameters(), 1.0);
  optimizer.step();
  const auto got = with.model->parameters(), want = without.model->parameters();
  for (std::size_t i = 0; i < want.size(); ++i) {
    const torch::NoGradGuard no_grad;
    CHECK(torch::allclose(tessera::full_tensor(got[i]), tessera::full_tensor(want[i]), 1e-5, 1e-6));
  }
}

namespace {

struct AverageImpl : torch::nn::Module {
  explicit AverageImpl(std::vector<at::Tensor> parameters) : of(std::move(parameters)) {
    for (const at::Tensor& p : of) register_buffer(std::to_string(buffers().size()), p.detach().clone());
  }
  void update(double decay) {
    const torch::NoGradGuard no_grad;
    torch::_foreach_lerp_(buffers(), of, 1 - decay);
  }
  void swap() {  // the model's weights and the average
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> averages = buffers();
    for (std::size_t i = 0; i < of.size(); ++i) {
      const at::Tensor weight = of[i].clone();
      of[i].copy_(averages[i]);
      averages[i].copy_(weight);
    }
  }
  std::vector<at::Tensor> of;
};
TORCH_MODULE(Average);

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/training.md: an average of the weights, swapped in, and saved with the model", {4}) {
  OnFourRanks job;
  auto& model = job.model;
  Average average(model->parameters());
  model->register_module("average", average);
  const auto values = [](const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> out;
    for (const at::Tensor& t : tensors) out.push_back(tessera::full_tensor(t.detach()).clone());
    return out;
  };
  std::vector<at::Tensor> want = values(model->parameters());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    job.loss().backward();
    optimizer.step();
    const tessera::CommCounter counter(job.mesh.world());
    average->update(0.9);
    CHECK(counter.total() == 0);
    const std::vector<at::Tensor> now = values(model->parameters());
    for (std::size_t i = 0; i < want.size(); ++i) want[i] = want[i] * 0.9 + now[i] * 0.1;
  }
  const std::vector<at::Tensor> last = values(model->parameters());
  const auto same = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(at::allclose(a[i], b[i]));
  };
  average->swap();
  same(values(model->parameters()), want);
  same(values(average->buffers()), last);
  average->swap();
  same(values(model->parameters()), last);
  const std::string folder = folder_of_all_ranks();
  tessera::TrainingState state = {.mesh = job.mesh, .model = *model, .optimizer = &optimizer};
  state.step = 1;
  tessera::save_training_state(state, folder);
  average->update(0);
  same(values(average->buffers()), last);
  tessera::load_newest_training_state(state, folder);
  same(values(average->buffers()), want);
}

TESSERA_RANKS_TEST_CASE("docs/training.md: under autocast parameters and gradients stay float32", {4}) {
  OnFourRanks job;
  tessera::Parallelized<NextWord>& parallel = job.parallel;
  const at::Tensor &ids = job.ids, &target = job.target;
  const double exact = job.loss().item<double>();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor logits = parallel(ids);  // bfloat16
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  const at::Tensor loss = torch::cross_entropy_loss(logits.to(at::kFloat).flatten(0, 1), target.flatten());
  CHECK((logits.scalar_type() == at::kBFloat16));
  CHECK(loss.item<double>() == doctest::Approx(exact).epsilon(0.01));
  loss.backward();
  for (const at::Tensor& parameter : job.model->parameters()) CHECK((parameter.grad().scalar_type() == at::kFloat));
}

TESSERA_RANKS_TEST_CASE("docs/training.md: a policy of dtypes", {4}) {
  OnFourRanks job;
  const double exact = job.loss().item<double>();
  const tessera::DeviceMesh& mesh = job.mesh;
  NextWord model(0.0);
  {
    const torch::NoGradGuard no_gradient;
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      model->parameters()[i].copy_(tessera::full_tensor(job.model->parameters()[i].detach()));
    }
  }
  const at::Tensor &ids = job.ids, &target = job.target;
  const tessera::ParallelPlan plan = {
      {"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}, {"head", tessera::ColwiseParallel()}};
  auto fast = tessera::parallelize_module(
      model, mesh, plan, {.compute_dtype = at::kBFloat16, .gradient_buckets = {.dtype = at::kBFloat16}});
  const at::Tensor logits = fast(ids);  // bfloat16
  const at::Tensor loss = torch::cross_entropy_loss(logits.to(at::kFloat).flatten(0, 1), target.flatten());
  CHECK((logits.scalar_type() == at::kBFloat16));
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(loss.item<double>() == doctest::Approx(exact).epsilon(0.01));
  const tessera::CommCounter counter(mesh);
  loss.backward();
  job.loss().backward();
  int64_t numbers = 0;
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    const at::Tensor gradient = model->parameters()[i].grad();
    CHECK((gradient.scalar_type() == at::kFloat));
    const at::Tensor got = tessera::full_tensor(gradient),
                     wanted = tessera::full_tensor(job.model->parameters()[i].grad());
    CHECK((got - wanted).abs().max().item<double>() <= 0.03 * wanted.abs().max().item<double>());
    numbers += tessera::to_local(gradient).numel();
  }
  int64_t bytes = 0;
  for (const auto& record : counter.records()) {
    if (record.op == "gradient" && record.mesh_dim == "dp") bytes += record.bytes;
  }
  // The first bucket is of `fast`; that of `job`, in float32, is as large again and once more. Each has seven flags.
  CHECK(bytes == (2 + 4) * (numbers + 7));
}

TESSERA_RANKS_TEST_CASE("docs/training.md: the state of LibTorch's generator", {2}) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {1, 2}, {"dp", "tp"});
  const std::string folder = folder_of_all_ranks();
  torch::manual_seed(static_cast<uint64_t>(mesh.world().rank()));
  torch::rand({3});

  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::string file = folder + "/random_" + std::to_string(mesh.world().rank()) + ".pt";
  torch::save(generator.get_state(), file);
  const at::Tensor want = torch::rand({3});
  {
    at::Tensor state;
    torch::load(state, file);
    generator.set_state(state);
  }
  CHECK(torch::equal(torch::rand({3}), want));
}

// ---- A transformer as PyTorch's tutorial on tensor parallelism cuts it, written from the pages alone.

namespace {

struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    for (torch::nn::Linear* linear : {&wq, &wk, &wv, &wo}) *linear = torch::nn::Linear(8, 8);
    register_module("wq", wq), register_module("wk", wk), register_module("wv", wv), register_module("wo", wo);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& t) { return t.view({x.size(0), x.size(1), 4, 2}).transpose(1, 2); };
    const at::Tensor y = torch::scaled_dot_product_attention(heads(wq(x)), heads(wk(x)), heads(wv(x)), {}, 0.0, true);
    return wo(y.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TESSERA_MODULE(Attention);

struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl() {
    for (torch::nn::Linear* linear : {&w1, &w3}) *linear = torch::nn::Linear(8, 24);
    w2 = torch::nn::Linear(24, 8);
    register_module("w1", w1), register_module("w2", w2), register_module("w3", w3);
  }
  at::Tensor forward(const at::Tensor& x) { return w2(torch::silu(w1(x)) * w3(x)); }
  torch::nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};
};
TESSERA_MODULE(FeedForward);

torch::nn::LayerNorm norm_of_8() { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})); }

struct BlockImpl : torch::nn::Module {
  BlockImpl() : attention_norm(norm_of_8()), ffn_norm(norm_of_8()) {
    register_module("attention_norm", attention_norm), register_module("ffn_norm", ffn_norm);
    register_module("attention", attention), register_module("feed_forward", feed_forward);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + attention(attention_norm(x));
    return h + feed_forward(ffn_norm(h));
  }
  torch::nn::LayerNorm attention_norm, ffn_norm;
  Attention attention;
  FeedForward feed_forward;
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  TransformerImpl() : tok_embeddings(kWords, 8), layers(Block(), Block()), norm(norm_of_8()), output(8, kWords) {
    register_module("tok_embeddings", tok_embeddings), register_module("layers", layers);
    register_module("norm", norm), register_module("output", output);
  }
  at::Tensor forward(const at::Tensor& ids) { return output(norm(layers->forward(tok_embeddings(ids)))); }
  torch::nn::Embedding tok_embeddings;
  torch::nn::Sequential layers;
  torch::nn::LayerNorm norm;
  torch::nn::Linear output;
};
TORCH_MODULE(Transformer);

}  // namespace

TESSERA_RANKS_TEST_CASE("a transformer with sequence parallelism trains on dp and tp as one process does", {1, 2, 4}) {
  using namespace tessera;
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const Job job = job_of_this_world();
  const DeviceMesh mesh = init_device_mesh("cpu", {job.dp, job.tp}, {"dp", "tp"});
  torch::manual_seed(0);
  Transformer plain;
  torch::manual_seed(0);
  Transformer model;
  const tessera::Placement whole = tessera::Replicate(), cut = tessera::Shard(1);
  const auto gathered = tessera::PrepareModuleInput({.input_layouts = {cut}, .desired_input_layouts = {whole}});
  const tessera::ParallelPlan plan = {{"tok_embeddings", tessera::RowwiseParallel({.output_layouts = cut})},
                                      {"layers.*.*_norm", tessera::SequenceParallel()},
                                      {"layers.*.attention", gathered},
                                      {"layers.*.attention.w[qkv]", tessera::ColwiseParallel()},
                                      {"layers.*.attention.wo", tessera::RowwiseParallel({.output_layouts = cut})},
                                      {"layers.*.feed_forward", gathered},
                                      {"layers.*.feed_forward.w[13]", tessera::ColwiseParallel()},
                                      {"layers.*.feed_forward.w2", tessera::RowwiseParallel({.output_layouts = cut})},
                                      {"norm", tessera::SequenceParallel()},
                                      {"output", tessera::ColwiseParallel()}};
  auto parallel = parallelize_module(model, mesh, plan);
  torch::optim::AdamW optimizer(model->parameters(), 0.01), plain_optimizer(plain->parameters(), 0.01);
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<at::Tensor> all_ids, all_targets;
    for (int64_t i = 0; i < job.dp; ++i) {
      all_ids.push_back(batches_of(job.dp, i, epoch).front().data);
      all_targets.push_back(batches_of(job.dp, i, epoch).front().target);
    }
    const auto mine = static_cast<std::size_t>(mesh.local_rank("dp"));
    const at::Tensor ids = from_local(all_ids[mine], mesh, {Shard(0), Replicate()});
    const at::Tensor target = from_local(all_targets[mine], mesh, {Shard(0), Replicate()});
    const auto step = [](auto& module, torch::optim::Optimizer& by, const at::Tensor& x, const at::Tensor& y) {
      by.zero_grad();
      const at::Tensor loss = torch::cross_entropy_loss(module(x).flatten(0, 1), y.flatten());
      loss.backward();
      by.step();
      return loss.item<double>();
    };
    const double want = step(plain, plain_optimizer, torch::cat(all_ids), torch::cat(all_targets));
    CHECK(step(parallel, optimizer, ids, target) == doctest::Approx(want).epsilon(1e-10));
  }
  for (const auto& parameter : plain->named_parameters()) {
    CAPTURE(parameter.key());
    const at::Tensor trained = full_tensor(model->named_parameters()[parameter.key()].detach());
    CHECK(torch::allclose(trained, parameter.value(), 1e-8, 1e-9));
  }
}
