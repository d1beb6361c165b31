// Tests the stages of ZeRO, parameters that are gathered ahead of their use, and replicas of shards.

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/clone.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/styles/block_plans.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"
#include "tessera/tests/training/data_placement.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

struct Cases {
  Block block{24, 12, 32};
  at::Tensor sequences = numbers({5, 6, 24}), four = numbers({4, 6, 24});
  Cases() { fill(*block); }
};
const Cases& cases() {
  static const Cases all;
  return all;
}

Block block() {
  const torch::NoGradGuard no_grad;
  Block fresh(24, 12, 32);
  fresh->to(device(), at::kDouble);
  const auto from = cases().block->named_parameters();
  for (auto& item : fresh->named_parameters()) item.value().copy_(from[item.key()]);
  return fresh;
}

ParallelizeOptions stage(int64_t number, int64_t ahead_bytes = int64_t{16} << 20) {
  return {.data_placement = Shard(0), .zero_stage = number, .gather_ahead_bytes = ahead_bytes};
}

// Has the weight [6, 6] of a layer, cut by ZeRO's stage `number`.
class CutWeight {
 public:
  CutWeight(const DeviceMesh& mesh, int64_t number)
      : identity_(from_local(at::eye(6, on(at::kDouble)), mesh, {Replicate(), Replicate()})) {
    linear_->to(device(), at::kDouble);
    parallelize_module(linear_, mesh, {}, stage(number));
  }
  const at::Tensor& weight() const { return linear_->weight; }
  // Returns the values that a product with `w`, such as the weight, uses.
  at::Tensor used(const at::Tensor& w) const { return full_tensor(at::matmul(identity_, w.t())).t(); }

 private:
  torch::nn::Linear linear_{6, 6};
  at::Tensor identity_;
};

// Trains both for four steps, with an evaluation and two micro-batches between, and compares.
template <class Optimizer, class Options>
void check_training(const DeviceMesh& mesh, const ParallelizeOptions& options, const Options& of_optimizer) {
  Block module = block(), reference = block();
  auto parallel = parallelize_module(module, mesh, kBlock, options);
  Optimizer ours(module->parameters(), of_optimizer), theirs(reference->parameters(), of_optimizer);
  const at::Tensor x = cases().sequences;
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    ours.zero_grad();
    theirs.zero_grad();
    for (int micro = 0; micro < 1 + step % 2; ++micro) {
      parallel(piece(x, mesh)).square().mean().backward();
      reference->forward(x).square().mean().backward();
    }
    check_parameters(*module, *reference, /*gradients=*/true, 1e-11, kKeyBias);
    ours.step();
    theirs.step();
    check_parameters(*module, *reference, /*gradients=*/false, 1e-11, kKeyBias);
    if (step != 1) continue;
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) CHECK(difference(parallel(piece(x, mesh)), reference->forward(x)) <= 1e-11);
  }
}

}  // namespace

TEST_CASE("training equals one process in every stage, with nothing, little or everything gathered ahead") {
  (void)cases();
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{1, 1}, {2, 1}, {1, 2}, {3, 1}, {2, 2}, {4, 1}}) {
    CAPTURE(fmt::format("{} x {}", shape[0], shape[1]));
    run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), shape, {"dp", "tp"}, world);
      for (const int64_t number : {1, 2, 3}) {
        CAPTURE(number);
        for (const int64_t ahead : {int64_t{0}, int64_t{5000}, int64_t{1} << 30}) {
          CAPTURE(ahead);
          check_training<torch::optim::SGD>(mesh, stage(number, ahead),
                                            torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
        }
        check_training<torch::optim::AdamW>(mesh, stage(number), torch::optim::AdamWOptions());
      }
    });
  }
}

TEST_CASE("what a rank holds: gradients whole in stage 1, in pieces from stage 2 on, the optimizer's state in pieces") {
  (void)cases();
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    for (const int64_t number : {1, 2, 3}) {
      CAPTURE(number);
      Block module = block();
      auto parallel = parallelize_module(module, mesh, kBlock, stage(number));
      torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions());
      parallel(piece(cases().sequences, mesh)).square().mean().backward();
      optimizer.step();
      for (const at::Tensor& each : module->parameters()) {
        CHECK(placements_of(each)[0].is_shard(0));
        CHECK(placements_of(each.grad())[0].is_replicate() == (number == 1));
        const auto& state =
            static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().at(each.unsafeGetTensorImpl()));
        CHECK(placements_of(state.exp_avg())[0].is_shard(0));
        CHECK(placements_of(state.exp_avg_sq())[0].is_shard(0));
      }
    }
  });
}

TEST_CASE("collectives of a step: stages 1 and 2 gather a parameter once, stage 3 again in backward; few together") {
  (void)cases();
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    struct Row {
      int64_t number;
      int64_t ahead;
      int64_t first, later;  // all-gathers of a step
    };
    // A block has 16 parameters. Backward uses 10 of them: the weights of its six products, and those of its two norms
    // with their biases. The first parameter of a step is never gathered ahead.
    const std::vector<Row> rows = {
        {1, 0, 16, 16}, {2, 0, 16, 16}, {3, 0, 26, 26}, {2, 1 << 30, 16, 2}, {3, 1 << 30, 26, 3}};
    for (const Row& row : rows) {
      CAPTURE(row.number);
      CAPTURE(row.ahead);
      Block module = block();
      auto parallel = parallelize_module(module, mesh, {}, stage(row.number, row.ahead));
      torch::optim::SGD optimizer(module->parameters(), torch::optim::SGDOptions(0.05));
      CommCounter counter(mesh);
      for (int step = 0; step < 4; ++step) {
        CAPTURE(step);
        optimizer.zero_grad();
        counter.reset();
        parallel(piece(cases().sequences, mesh)).square().mean().backward();
        CAPTURE(counter.to_string());
        int64_t gathers = 0;
        for (const CollectiveRecord& each : counter.records()) {
          gathers += std::string(each.kind) == "all_gather" && each.op != "gradient";
        }
        CHECK(gathers == (step == 0 ? row.first : row.later));
        CHECK(counter.count("reduce_scatter") == (row.number == 1 ? 0 : 1));
        CHECK(counter.count("all_reduce") == (row.number == 1 ? 1 : 0));
        optimizer.step();
      }
    }
  });
}

TEST_CASE("a clone, a written parameter and a parameter given new values are gathered as they are now") {
  (void)cases();
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    for (const int64_t number : {2, 3}) {
      CAPTURE(number);
      const torch::NoGradGuard no_grad;
      const CutWeight cut(mesh, number);
      const at::Tensor& weight = cut.weight();
      const auto used = [&](const at::Tensor& w) { return cut.used(w); };
      for (int i = 0; i < 3; ++i) {
        CAPTURE(i);
        weight.fill_(1);
        CHECK(used(weight).equal(at::ones({6, 6}, on(at::kDouble))));
        at::Tensor clone = weight.clone();
        clone.mul_(5);
        CHECK(used(clone).equal(at::full({6, 6}, 5.0, on(at::kDouble))));
        CHECK(used(weight).equal(at::ones({6, 6}, on(at::kDouble))));
        weight.mul_(3);
        CHECK(used(weight).equal(at::full({6, 6}, 3.0, on(at::kDouble))));
        weight.set_data(clone);
        CHECK(used(weight).equal(at::full({6, 6}, 5.0, on(at::kDouble))));
        CHECK(used(weight * 2).equal(at::full({6, 6}, 10.0, on(at::kDouble))));
        CHECK(used(weight).equal(at::full({6, 6}, 5.0, on(at::kDouble))));
      }
    }
  });
}

TEST_CASE("after set_data ranks gather the same ahead, though one of them keeps a piece of the old values") {
  (void)cases();
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    const torch::NoGradGuard no_grad;
    for (const int64_t number : {1, 2, 3}) {
      CAPTURE(number);
      torch::nn::Linear a(6, 6), b(6, 6), c(6, 6);
      torch::nn::Sequential three(a, b, c);
      three->to(device(), at::kDouble);
      parallelize_module(three, mesh, {}, stage(number));
      const at::Tensor x = from_local(at::eye(6, on(at::kDouble)), mesh, {Replicate(), Replicate()});
      for (int i = 0; i < 4; ++i) three->forward(x);  // the order is learned
      std::vector<at::Tensor> kept;
      for (int i = 0; i < 4; ++i) {
        if (mesh.local_rank("dp") == 0) kept.push_back(to_local(b->weight.detach()));
        for (at::Tensor& p : three->parameters()) p.set_data(p * 2);
        for (int j = 0; j < 3; ++j) {
          at::Tensor want = at::eye(6, on(at::kDouble));
          for (const auto& layer : {a, b, c})
            want = at::linear(want, full_tensor(layer->weight), full_tensor(layer->bias));
          CHECK(difference(three->forward(x), want) <= 1e-9 * want.abs().max().item<double>());
        }
      }
      CommCounter counter(mesh);
      three->forward(x);
      CHECK(counter.total() <= (number == 3 ? 6 : 0));
    }
  });
}

TEST_CASE("values that set_data brings are used, also those of the same memory, and those of a copy of the module") {
  (void)cases();
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    const torch::NoGradGuard no_grad;
    const auto filled = [](double value) { return at::full({6, 6}, value, on(at::kDouble)); };
    for (const int64_t number : {1, 2, 3}) {
      CAPTURE(number);
      const CutWeight cut(mesh, number);
      at::Tensor weight = cut.weight();
      const auto used = [&] { return cut.used(weight); };
      for (int writes = 0; writes < 4; ++writes) {
        weight.fill_(1);
        for (int i = 0; i < 6; ++i) CHECK(used().equal(filled(1)));
        const at::Tensor piece = to_local(weight.detach());
        piece.fill_(1);
        for (int i = 0; i < writes; ++i) piece.mul_(2);
        weight.set_data(from_local(piece, mesh, placements_of(weight)));
        CHECK(used().equal(filled(1 << writes)));
      }
      weight.fill_(3);
      torch::nn::Linear linear(6, 6);
      linear->to(device(), at::kDouble);
      parallelize_module(linear, mesh, {}, stage(number));
      linear->weight.fill_(3);
      const auto copy = clone_module(*linear);
      at::Tensor of_copy = copy->named_parameters()["weight"];
      of_copy.fill_(5);
      const auto schedule = tessera::detail::meta(linear->weight).contract->gather_schedule;
      CHECK(schedule != nullptr);
      CHECK(tessera::detail::meta(of_copy).contract->gather_schedule == nullptr);
      for (int i = 0; i < 6; ++i) {
        CHECK(cut.used(linear->weight).equal(filled(3)));
        CHECK(cut.used(of_copy).equal(filled(5)));
      }
      linear->weight.set_data(of_copy);
      CHECK(tessera::detail::meta(linear->weight).contract->gather_schedule == schedule);
      for (int i = 0; i < 6; ++i) CHECK(cut.used(linear->weight).equal(filled(5)));
    }
  });
}

TEST_CASE("what nobody holds any more is freed in every stage: a module's pieces, and the schedule of its gathers") {
  (void)cases();
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    for (const int64_t number : {1, 2, 3}) {
      CAPTURE(number);
      std::optional<CutWeight> cut(std::in_place, mesh, number);
      const at::Tensor& weight = cut->weight();
      for (int i = 0; i < 6; ++i) cut->used(weight).sum().backward();
      const at::Tensor kept = weight.detach().clone();  // knows nothing of the others
      const auto memory = to_local(weight.detach()).storage().getWeakStorageImpl();
      const std::weak_ptr<GatherSchedule> schedule = tessera::detail::meta(weight).contract->gather_schedule;
      CHECK_FALSE(memory.expired());
      CHECK_FALSE(schedule.expired());
      cut.reset();
      clear_dispatch_cache();
      CHECK(memory.expired());
      CHECK(schedule.expired());
    }
  });
}

TEST_CASE("parameters that a graph's replays may write are gathered at each use") {
  (void)cases();
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    for (const int64_t number : {2, 3}) {
      CAPTURE(number);
      const torch::NoGradGuard no_grad;
      const CutWeight cut(mesh, number);
      const at::Tensor& weight = cut.weight();
      const auto used = [&] { return cut.used(weight); };
      const auto filled = [](double value) { return at::full({6, 6}, value, on(at::kDouble)); };
      weight.fill_(1);
      for (int i = 0; i < 6; ++i) CHECK(used().equal(filled(1)));
      // Optimizers write the parameter itself or data() of it; both have the schedule.
      CHECK(tessera::detail::meta(weight.data()).contract == tessera::detail::meta(weight).contract);
      tessera::detail::meta(weight).contract->gather_schedule->expect_unseen_writes();
      // A write to another tensor of the same memory is not counted, as those of a replay are not.
      const at::Tensor piece = to_local(weight.detach());
      const at::Tensor same_memory = at::empty({0}, on(at::kDouble)).set_(piece.storage(), 0, piece.sizes());
      CommCounter counter(mesh);
      for (int i = 2; i < 6; ++i) {
        CAPTURE(i);
        same_memory.fill_(i);
        counter.reset();
        CHECK(used().equal(filled(i)));
        CHECK(counter.count("all_gather") == 1);
      }
    }
  });
}

TEST_CASE("parameters that were made under InferenceMode are gathered at each use: writes to pieces are not counted") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    const c10::InferenceMode mode;
    for (const int64_t number : {1, 2, 3}) {
      CAPTURE(number);
      torch::nn::Sequential layers;
      for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
      layers->to(device(), at::kDouble);
      auto parallel = parallelize_module(layers, mesh, {}, stage(number));
      const at::Tensor x = from_local(at::ones({1, 4}, on(at::kDouble)), mesh, {Shard(0), Replicate()});
      for (const double value : {0.25, 0.5, 1.0}) {
        CAPTURE(value);
        for (const at::Tensor& each : layers->parameters()) to_local(each).fill_(value);
        for (int time = 0; time < 2; ++time) {
          const CommCounter counter(mesh);
          const double want = std::pow(4 * value, 4);
          CHECK(full_tensor(parallel(x)).equal(at::full({2, 4}, want, on(at::kDouble))));
          CHECK(counter.count("all_gather") == 5);
        }
      }
    }
  });
}

TEST_CASE("where one parameter becomes an inference tensor, it alone is gathered at each use") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    const at::Tensor x = from_local(at::ones({1, 8}, on(at::kDouble)), mesh, {Shard(0), Replicate()});
    for (const int64_t number : {2, 3}) {
      CAPTURE(number);
      torch::nn::Sequential layers;
      for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
      layers->to(device(), at::kDouble);
      auto parallel = parallelize_module(layers, mesh, {}, stage(number));
      const c10::InferenceMode mode;
      for (const at::Tensor& each : layers->parameters()) each.fill_(0.125);
      for (int time = 0; time < 3; ++time) CHECK(to_local(parallel(x)).equal(at::ones({1, 8}, on(at::kDouble))));
      const at::Tensor changed = layers->parameters()[1];
      changed.set_data(changed + 0.125);
      CHECK(to_local(changed).is_inference());
      for (const double factor : {2.0, 4.0, 8.0}) {
        for (int time = 0; time < 2; ++time) {
          const CommCounter counter(mesh);
          CHECK(to_local(parallel(x)).equal(at::full({1, 8}, factor, on(at::kDouble))));
          if (number == 2) CHECK(counter.count("all_gather") == 1);
        }
        to_local(changed).mul_(2);
      }
    }
  });
}

TEST_CASE("conjugate views, and values taken over from a tensor that was written as often") {
  torch::nn::Linear original(6, 6);
  original->to(device(), at::kComplexDouble);
  const at::Tensor values = original->weight.detach().clone(), x = at::eye(6, on(at::kComplexDouble));
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
    for (const int64_t number : {2, 3}) {
      CAPTURE(number);
      torch::nn::Linear linear(torch::nn::LinearOptions(6, 6).bias(false));
      linear->to(device(), at::kComplexDouble);
      const torch::NoGradGuard no_grad;
      linear->weight.copy_(values);
      parallelize_module(linear, mesh, {}, stage(number));
      const at::Tensor in = from_local(x, mesh, {Replicate(), Replicate()});
      for (int i = 0; i < 3; ++i) {
        CAPTURE(i);
        CHECK(full_tensor(at::matmul(in, linear->weight)).equal(values));
        CHECK(full_tensor(at::matmul(in, linear->weight.conj())).resolve_conj().equal(values.conj().resolve_conj()));
        CHECK(full_tensor(at::matmul(in, linear->weight.mH())).resolve_conj().equal(values.mH().resolve_conj()));
      }
      const at::Tensor first = linear->weight.clone() * 2, second = linear->weight.clone() * 3;
      linear->weight.set_data(first);
      CHECK(full_tensor(at::matmul(in, linear->weight)).equal(values * 2));
      linear->weight.set_data(second);
      CHECK(full_tensor(at::matmul(in, linear->weight)).equal(values * 3));
      // Rows of one tensor have one memory and one count of writes.
      const at::Tensor bank = distribute_tensor(at::stack({values * 4, values * 5}), mesh, {Shard(1), Replicate()});
      for (int64_t i = 0; i < 4; ++i) {
        linear->weight.set_data(bank.select(0, i % 2));
        CHECK(full_tensor(at::matmul(in, linear->weight)).equal(values * (4 + i % 2)));
      }
      // Views of one element on, with other strides or conjugated.
      const at::Tensor wide = at::stack({values, values * 6}, 1);
      const at::Tensor both = distribute_tensor(wide, mesh, {Shard(0), Replicate()});
      for (int64_t i = 0; i < 2; ++i) {
        linear->weight.set_data(both.select(1, 0));
        CHECK(full_tensor(at::matmul(in, linear->weight)).equal(values));
        linear->weight.set_data(both.select(1, 0).conj());
        CHECK(full_tensor(at::matmul(in, linear->weight)).equal(values.conj()));
        linear->weight.set_data(both.view({6, 6, 2}).select(2, 0));
        CHECK(full_tensor(at::matmul(in, linear->weight)).equal(wide.view({6, 6, 2}).select(2, 0)));
      }
    }
  });
}

TEST_CASE("replicas of shards: parameters are cut over one data dimension, and gradients reduced over both") {
  (void)cases();
  run_in_process(4, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2, 1}, {"replica", "dp", "tp"}, world);
    Block module = block(), reference = block();
    auto parallel = parallelize_module(module, mesh, kBlock, {.data_placement = Shard(0), .shard_dims = {{"dp"}}});
    const at::Tensor& x = cases().four;
    const at::Tensor rows = x.narrow(0, mesh.local_rank("replica") * 2 + mesh.local_rank("dp"), 1).contiguous();
    CommCounter counter(mesh);
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      module->zero_grad();
      reference->zero_grad();
      const at::Tensor loss = parallel(from_local(rows, mesh, {Shard(0), Shard(0), Replicate()})).square().mean();
      counter.reset();
      loss.backward();
      CAPTURE(counter.to_string());
      CHECK(counter.count("reduce_scatter") == 1);
      CHECK(counter.count("all_reduce") == 1);
      reference->forward(x).square().mean().backward();
      for (const at::Tensor& each : module->parameters()) {
        CHECK(placements_of(each)[0].is_replicate());
        CHECK(placements_of(each)[1].is_shard(0));
        CHECK(placements_of(each.grad()) == placements_of(each));
      }
      check_parameters(*module, *reference, /*gradients=*/true, 1e-11, kKeyBias);
    }
  });
}

TEST_CASE("refused: a stage that ZeRO does not have, and dimensions that are not for data") {
  const auto refused = [](const ParallelizeOptions& options, const std::string& text) {
    check_refused_on_every_rank({2, 2}, {"dp", "tp"}, text, [&](const DeviceMesh& mesh) {
      Mlp mlp(4, 4, 4);
      parallelize_module(mlp, mesh, {}, options);
    });
  };
  refused({.data_placement = Shard(0), .zero_stage = 4}, "zero_stage 4; give 1, 2 or 3");
  refused({.compute_dtype = at::kFloat}, "compute_dtype Float; give bfloat16 or float16");
  refused({.gradient_buckets = {.dtype = at::kLong}}, "gradient_buckets.dtype Long; give a floating one");
  refused({.gather_ahead_bytes = -1}, "gather_ahead_bytes -1; give 0 or more");
  refused({.data_placement = Shard(0), .shard_dims = {{"tp"}}},
          "shard_dims [tp] of {dp: 2, tp: 2}; name each once, out of the data dimensions [dp]");
  refused({.data_placement = Shard(0), .shard_dims = {{"fsdp"}}},
          "options.shard_dims: mesh {dp: 2, tp: 2} has no mesh dimension 'fsdp'; there are: dp, tp");
}
