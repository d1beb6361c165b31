// Trains random models by random plans on random meshes, and compares with one process after each part of a step: the
// features of training meet in combinations that nobody would write down. TESSERA_RANDOM_RUNS=N tries N of them.

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tessera.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/training/random_model.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr double kTolerance = 1e-8;

// Says how a model lies on a mesh.
struct Setup {
  DeviceMesh mesh;
  ParallelPlan plan;
  ParallelizeOptions options;
};

DeviceMesh random_mesh(Random& random) {
  const int64_t n = world()->size();
  std::vector<std::pair<std::vector<int64_t>, std::vector<std::string>>> all = {
      {{n}, {"tp"}}, {{n}, {"dp"}}, {{n, 1}, {"dp", "tp"}}, {{1, n}, {"dp", "tp"}}};
  if (n == 4) {
    all.insert(all.end(), {{{2, 2}, {"dp", "tp"}},
                           {{2, 2}, {"dp", "tp"}},
                           {{2, 2, 1}, {"replicas", "dp", "tp"}},
                           {{2, 1, 2}, {"replicas", "dp", "tp"}}});
  }
  const auto& [shape, names] = all[static_cast<std::size_t>(pick(random, static_cast<int64_t>(all.size())))];
  return init_device_mesh(device_name(), shape, names, world());
}

bool has_dim(const DeviceMesh& mesh, const std::string& name) {
  return std::ranges::find(mesh.mesh().names(), name) != mesh.mesh().names().end();
}

// Adds the styles of one part: products that are cut by columns, then by rows, or the other way round.
void add_part(ParallelPlan& plan, const std::string& path, const PartImpl& part, bool sequence, Random& random) {
  if (sequence && part.part.norm) plan.emplace_back(path + ".norm", SequenceParallel());
  if (chance(random, 5)) return;
  const bool turned = part.part.kind != PartShape::Kind::kAttention && chance(random, 4);
  Style first = RowwiseParallel(), second = ColwiseParallel();
  if (!turned) {
    StyleLayouts rows;
    if (sequence) rows.output_layouts = Shard(1);
    first = ColwiseParallel({.gather_input_again = sequence && chance(random, 2)});
    second = RowwiseParallel(rows);
  }
  for (const auto& child : part.named_children()) {
    if (child.key() == "norm") continue;
    plan.emplace_back(path + "." + child.key(), child.key() == "down" || child.key() == "out" ? second : first);
  }
}

ParallelPlan random_plan(const RandomModelImpl& model, Random& random) {
  ParallelPlan out;
  const bool sequence = chance(random, 3);
  for (std::size_t i = 0; i < model.parts.size(); ++i) {
    add_part(out, fmt::format("part{}", i), *model.parts[i], sequence, random);
  }
  const auto add = [&](const char* name, const StyleLayouts& rows) {
    const int64_t style = pick(random, 3);
    if (style == 1) out.emplace_back(name, ColwiseParallel());
    if (style == 2) out.emplace_back(name, RowwiseParallel(rows));
  };
  StyleLayouts along_sequence;
  if (sequence) along_sequence.output_layouts = Shard(1);
  add("embed", along_sequence);
  if (sequence) out.emplace_back("norm", SequenceParallel());
  if (!model.shape.tied) add("head", {});
  return out;
}

Setup random_setup(const RandomModelImpl& model, Random& random) {
  Setup out{random_mesh(random), {}, {}};
  if (has_dim(out.mesh, "tp")) out.plan = random_plan(model, random);
  if (has_dim(out.mesh, "dp") && chance(random, 2)) {
    out.options.data_placement = Shard(0);
    out.options.zero_stage = 1 + pick(random, 3);
    if (chance(random, 2)) out.options.gather_ahead_bytes = 800 * pick(random, 2);
    if (has_dim(out.mesh, "replicas") && chance(random, 2)) out.options.shard_dims = MeshDims{"dp"};
  }
  if (chance(random, 2)) out.options.gradient_buckets.bucket_bytes = 600 * pick(random, 2);
  return out;
}

std::string to_string(const Setup& setup) {
  const ParallelizeOptions& options = setup.options;
  return fmt::format("{}, ZeRO {}{}, {} bytes ahead, buckets of {} bytes, plan\n{}", setup.mesh.to_string(),
                     options.data_placement ? options.zero_stage : 0, options.shard_dims ? " over dp" : "",
                     options.gather_ahead_bytes, options.gradient_buckets.bucket_bytes, to_string(setup.plan));
}

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

// The steps do not divide by gradients that are zero but for rounding: eps is large.
Optimizer make_optimizer(int64_t kind, const RandomModelImpl& model) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  const auto p = model.parameters();
  switch (kind) {
    case 0: return std::make_unique<SGD>(p, SGDOptions(0.05).momentum(0.9).weight_decay(0.1).nesterov(true));
    case 1: return std::make_unique<AdamW>(p, AdamWOptions(0.01).eps(1e-3));
    case 2: return std::make_unique<Adam>(p, AdamOptions(0.01).eps(1e-3).amsgrad(true).weight_decay(0.1));
    case 3: return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).eps(1e-3).momentum(0.5).centered(true));
    default: return std::make_unique<Adagrad>(p, AdagradOptions(0.05).eps(1e-3));
  }
}

// Compares values, or gradients, of which one may be missing where the other is zero.
void compare(const RandomModelImpl& got, const RandomModelImpl& want, bool gradients) {
  const torch::NoGradGuard no_grad;
  const auto wanted = want.named_parameters();
  for (const auto& item : got.named_parameters()) {
    CAPTURE(item.key());
    const at::Tensor& expected = wanted[item.key()];
    CHECK(item.value().requires_grad() == expected.requires_grad());
    const at::Tensor a = gradients ? item.value().grad() : item.value();
    const at::Tensor b = gradients ? expected.grad() : expected;
    const at::Tensor zero = at::zeros_like(expected);
    CHECK(close(a.defined() ? full_tensor(a.detach()) : zero, b.defined() ? b.detach() : zero, kTolerance));
  }
}

// Trains one model by a plan, and its twin in this process.
class Run {
 public:
  explicit Run(unsigned seed) : random_(seed), shape_(random_shape(random_)), want_(shape_, seed), got_(shape_, seed) {
    history_ = tessera::testing::to_string(shape_);
    optimizer_kind_ = pick(random_, 5);
    scales_ = chance(random_, 5);
    place(random_setup(*got_, random_));
    theirs_ = make_optimizer(optimizer_kind_, *want_);
  }

  void train() {
    const int64_t steps = 3 + pick(random_, 3);
    for (step_ = 0; step_ < steps; ++step_) {
      zero_gradients();
      if (chance(random_, 6)) freeze_or_train();
      if (chance(random_, 5)) evaluate();
      backward();
      if (chance(random_, 2)) clip();
      update();
      if (chance(random_, 6)) save_and_move();
    }
  }

 private:
  void note(const std::string& text) { history_ += text; }

  void place(Setup setup) {
    note(fmt::format("on {}optimizer {}{}\n", to_string(setup), optimizer_kind_, scales_ ? ", scaled" : ""));
    setup_.emplace(std::move(setup));
    parallel_.emplace(parallelize_module(got_, setup_->mesh, setup_->plan, setup_->options));
    ours_ = make_optimizer(optimizer_kind_, *got_);
  }

  void zero_gradients() {
    const bool to_none = chance(random_, 2);
    note(fmt::format("step {}: gradients {};", step_, to_none ? "dropped" : "zeroed"));
    ours_->zero_grad(to_none);
    theirs_->zero_grad(to_none);
  }

  void freeze_or_train() {
    auto theirs = want_->named_parameters();
    const std::string name = theirs[static_cast<std::size_t>(pick(random_, static_cast<int64_t>(theirs.size())))].key();
    const bool trains = !theirs[name].requires_grad();
    note(fmt::format(" {} {};", trains ? "trains" : "freezes", name));
    theirs[name].set_requires_grad(trains);
    got_->named_parameters()[name].set_requires_grad(trains);
  }

  void evaluate() {
    note(" evaluates;");
    CAPTURE(history_);
    const at::Tensor ids = whole_numbers({3, shape_.length}, at::kLong, pick(random_, 100));
    std::optional<c10::InferenceMode> inference;
    if (chance(random_, 2)) inference.emplace();
    const torch::NoGradGuard no_grad;
    CHECK(close(full_tensor((*parallel_)(feed(ids), step_)), want_->forward(ids, step_), kTolerance));
  }

  void backward() {
    const int64_t count = 1 + pick(random_, 3);
    const bool deferred = chance(random_, 2);
    note(fmt::format(" {} micro-batches{} of", count, deferred ? ", reduced together," : ""));
    for (int64_t i = 0; i < count; ++i) {
      std::optional<AccumulateGradients> guard;
      if (deferred && i + 1 < count) guard.emplace(setup_->mesh);
      micro_batch(count);
    }
    CAPTURE(history_);
    if (scales_) scaler_.unscale_(*ours_);
    compare(*got_, *want_, /*gradients=*/true);
  }

  void micro_batch(int64_t count) {
    const int64_t batch = 1 + pick(random_, 6), salt = pick(random_, 100);
    note(fmt::format(" {}", batch));
    CAPTURE(history_);
    const at::Tensor ids = whole_numbers({batch, shape_.length}, at::kLong, salt) * 2;
    const at::Tensor targets = whole_numbers({batch, shape_.length}, at::kLong, salt + 1);
    const at::Tensor logits = want_->forward(ids, step_), ours = (*parallel_)(feed(ids), step_);
    const at::Tensor want = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten()) / count;
    const at::Tensor got = at::cross_entropy_loss(ours.flatten(0, 1), feed(targets).flatten()) / count;
    CHECK(close(full_tensor(got.detach()), want.detach(), kTolerance));
    (scales_ ? scaler_.scale(got) : got).backward();
    want.backward();
  }

  void clip() {
    const double type = chance(random_, 3) ? std::numeric_limits<double>::infinity() : 2.0;
    note(fmt::format("; clips by norm {}", type));
    CAPTURE(history_);
    const double want = torch::nn::utils::clip_grad_norm_(want_->parameters(), 0.5, type);
    CHECK(clip_grad_norm_(got_->parameters(), 0.5, type) == doctest::Approx(want).epsilon(kTolerance));
  }

  void update() {
    note("\n");
    CAPTURE(history_);
    if (scales_) {
      scaler_.step(*ours_);
      scaler_.update();
    } else {
      ours_->step();
    }
    theirs_->step();
    compare(*got_, *want_, /*gradients=*/false);
  }

  // Saves the state, and goes on with a new model on another mesh, by another plan. A new model has no gradients.
  void save_and_move() {
    note("saves and goes on ");
    const SharedFolder folder(setup_->mesh);
    save_training_state({.mesh = setup_->mesh, .model = *got_, .optimizer = ours_.get(), .step = step_}, folder.path());
    got_ = RandomModel(shape_, 0);
    for (const auto& item : want_->named_parameters()) {
      got_->named_parameters()[item.key()].set_requires_grad(item.value().requires_grad());
    }
    place(random_setup(*got_, random_));
    CAPTURE(history_);
    TrainingState state{.mesh = setup_->mesh, .model = *got_, .optimizer = ours_.get()};
    REQUIRE(load_newest_training_state(state, folder.path()));
    CHECK(state.step == step_);
    theirs_->zero_grad();
    compare(*got_, *want_, /*gradients=*/false);
  }

  // Returns what a batch is on the mesh: cut where the batch is split, else whole.
  at::Tensor feed(const at::Tensor& whole) const {
    Placements placements;
    for (const std::string& name : setup_->mesh.mesh().names()) {
      placements.push_back(name == "tp" ? Placement(Replicate()) : Shard(0));
    }
    return spread(whole, setup_->mesh, placements);
  }

  Random random_;
  const ModelShape shape_;
  RandomModel want_, got_;
  std::string history_;  // what the run has done, for messages
  int64_t optimizer_kind_ = 0;
  bool scales_ = false;
  LossScaler scaler_{{.initial_scale = 8}};
  int64_t step_ = 0;
  std::optional<Setup> setup_;
  std::optional<Parallelized<RandomModel>> parallel_;
  Optimizer ours_, theirs_;
};

}  // namespace

TESSERA_RANKS_TEST_CASE("random runs train as one process does",
                        Ranks({1, 2, 3, 4}).time_limit(std::chrono::minutes(30))) {
  for (unsigned seed = 0; seed < random_runs(20); ++seed) {
    CAPTURE(seed);
    Run(seed).train();
  }
}
