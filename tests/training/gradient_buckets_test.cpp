// Tests gradients that are reduced in buckets: values against one process, collectives, and what must not hang.

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/layers/activation_checkpoint.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/training/data_placement.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

const ParallelPlan kSequence = {{"norm[12]", SequenceParallel()},
                                {"attn.w[qkv]", ColwiseParallel()},
                                {"attn.wo", RowwiseParallel({.output_layouts = Shard(1)})},
                                {"mlp.up", ColwiseParallel()},
                                {"mlp.down", RowwiseParallel({.output_layouts = Shard(1)})}};
const std::vector<std::vector<int64_t>> kMeshes = {{1, 1}, {2, 1}, {1, 2}, {3, 1}, {1, 3}, {2, 2}, {4, 1}};

void on_meshes(const std::function<void(const DeviceMesh&)>& body,
               const std::vector<std::vector<int64_t>>& shapes = kMeshes) {
  for (const std::vector<int64_t>& shape : shapes) {
    CAPTURE(fmt::format("{} x {}", shape[0], shape[1]));
    run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
      body(init_device_mesh(device_name(), shape, {"dp", "tp"}, world));
    });
  }
}

// Torch's generator belongs to the process: modules and inputs are made before the ranks start.
struct Cases {
  Block block{24, 12, 32};
  Mlp mlp{10, 16, 12};
  at::Tensor sequences = numbers({5, 6, 24}), rows = numbers({5, 10}), two_rows = numbers({2, 10});
  Cases() {
    fill(*block);
    fill(*mlp);
  }
};
const Cases& cases() {
  static const Cases all;
  return all;
}

template <class Holder>
Holder copy_of(const Holder& module, Holder fresh) {
  const torch::NoGradGuard no_grad;
  fresh->to(device(), at::kDouble);
  const auto from = module->named_parameters();
  for (auto& item : fresh->named_parameters()) item.value().copy_(from[item.key()]);
  return fresh;
}
Block block() { return copy_of(cases().block, Block(24, 12, 32)); }
Mlp mlp() { return copy_of(cases().mlp, Mlp(10, 16, 12)); }

// Adds the gradients of one backward to those of `module`, in one process.
void step_of(Block& module, double factor = 1) {
  (module->forward(cases().sequences).square().mean() * factor).backward();
}
void step_of(Mlp& module, double factor = 1) { (module->forward(cases().rows).square().mean() * factor).backward(); }

template <class Parallel>
at::Tensor loss_of(Parallel& parallel, const at::Tensor& x, const DeviceMesh& mesh) {
  return parallel(piece(x, mesh)).square().mean();
}

}  // namespace

TEST_CASE("gradients equal one process, step after step, in buckets of any size") {
  (void)cases();
  for (const int64_t bytes : {int64_t{25} << 20, int64_t{3000}, int64_t{1}, int64_t{0}}) {
    CAPTURE(bytes);
    on_meshes([&](const DeviceMesh& mesh) {
      Block module = block(), reference = block();
      auto parallel = parallelize_module(module, mesh, kSequence, {.gradient_buckets = {.bucket_bytes = bytes}});
      torch::optim::SGD ours(module->parameters(), torch::optim::SGDOptions(0.05)),
          theirs(reference->parameters(), torch::optim::SGDOptions(0.05));
      for (int i = 0; i < 4; ++i) {
        CAPTURE(i);
        // In the third step the old gradients are kept, and written by zeros.
        ours.zero_grad(/*set_to_none=*/i != 2);
        theirs.zero_grad(/*set_to_none=*/i != 2);
        loss_of(parallel, cases().sequences, mesh).backward();
        step_of(reference);
        for (const auto& item : module->named_parameters()) {
          CAPTURE(item.key());
          CHECK(placements_of(item.value().grad()) == placements_of(item.value()));
        }
        check_parameters(*module, *reference, /*gradients=*/true, 1e-11, kKeyBias);
        ours.step();
        theirs.step();
      }
    });
  }
}

TEST_CASE("collectives: one per bucket, and an exchange of the order before the second") {
  (void)cases();
  on_meshes(
      [](const DeviceMesh& mesh) {
        Block module = block();
        auto parallel = parallelize_module(module, mesh, kSequence);
        CommCounter counter(mesh);
        std::vector<int64_t> all_gathers, all_reduces;
        for (int i = 0; i < 3; ++i) {
          const at::Tensor loss = loss_of(parallel, cases().sequences, mesh);
          counter.reset();
          loss.backward();
          int64_t all_reduce = 0, all_gather = 0;
          for (const CollectiveRecord& each : counter.records()) {
            if (each.op != "gradient") continue;
            all_reduce += std::string(each.kind) == "all_reduce";
            all_gather += std::string(each.kind) == "all_gather";
          }
          all_reduces.push_back(all_reduce);
          all_gathers.push_back(all_gather);
        }
        CAPTURE(counter.to_string());
        // 16 parameters: the six of norms and row-wise biases are pending over tp too. The first step reduces those one
        // by one over tp, and then all over dp.
        const bool tp = mesh.size(1) > 1, dp = mesh.size(0) > 1;
        CHECK(all_reduces[0] == (tp ? 6 : 0) + (dp ? 1 : 0));
        CHECK(all_reduces[1] == (tp ? 1 : 0) + (dp ? 1 : 0));
        CHECK(all_reduces[2] == all_reduces[1]);
        CHECK(all_gathers == std::vector<int64_t>{0, 1, 0});
      },
      {{2, 1}, {1, 2}, {2, 2}, {4, 1}});
}

TEST_CASE("the gradients of a bucket lie in the memory in which they were reduced, each in a part of its own") {
  (void)cases();
  on_meshes(
      [&](const DeviceMesh& mesh) {
        Mlp module = mlp();
        auto parallel = parallelize_module(module, mesh, {});
        for (int i = 0; i < 3; ++i) {
          for (const at::Tensor& each : module->parameters()) each.mutable_grad().reset();
          loss_of(parallel, cases().rows, mesh).backward();
          std::vector<at::Tensor> pieces, before;
          for (const at::Tensor& each : module->parameters()) {
            pieces.push_back(to_local(each.grad()));
            before.push_back(pieces.back().clone());
            CHECK(pieces.back().is_contiguous());
            CHECK(pieces.back().is_alias_of(pieces.front()));
          }
          for (std::size_t k = 0; k < pieces.size(); ++k) {
            module->parameters()[k].grad().zero_();
            for (std::size_t other = 0; other < pieces.size(); ++other) {
              CHECK(at::equal(pieces[other], other <= k ? at::zeros_like(before[other]) : before[other]));
            }
          }
        }
      },
      {{2, 1}, {4, 1}});
}

TEST_CASE("where the cost model has a slow mesh dimension, a bucket crosses it last and in parts") {
  (void)cases();
  const CostModel slow_host{.links = {{400, 34}, {150, 1676}, {}}};
  struct Row {
    const char* why;
    CostModel model;
    std::vector<std::string> wanted;  // the collectives of the gradients
    double share;                     // of a rank's gradients, sent between hosts or over both mesh dimensions
  };
  const std::vector<Row> rows = {
      {"all links are equal", {}, {"all_reduce host+dp"}, 1},
      {"the network is slow", slow_host, {"reduce_scatter dp", "all_reduce host", "all_gather dp"}, 0.5},
  };
  const at::Tensor x = at::arange(80, on(at::kDouble)).view({8, 10}).sin();
  for (const Row& row : rows) {
    CAPTURE(row.why);
    run_in_process(4, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2, 1}, {"host", "dp", "tp"}, world);
      Mlp module = mlp(), reference = mlp();
      auto parallel = parallelize_module(module, mesh, {}, {.gradient_buckets = {.cost_model = row.model}});
      torch::optim::SGD ours(module->parameters(), torch::optim::SGDOptions(0.05)),
          theirs(reference->parameters(), torch::optim::SGDOptions(0.05));
      CommCounter counter(mesh);
      for (int step = 0; step < 3; ++step) {
        CAPTURE(step);
        ours.zero_grad();
        theirs.zero_grad();
        const at::Tensor piece = distribute_tensor(x, mesh, {Shard(0), Shard(0), Replicate()}, kNoSource);
        const at::Tensor loss = parallel(piece).square().mean();
        counter.reset();
        loss.backward();
        reference->forward(x).square().mean().backward();
        check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
        std::vector<std::string> collectives;
        int64_t bytes = 0;
        for (const CollectiveRecord& each : counter.records()) {
          if (each.op != "gradient" || each.mesh_dim == "host+dp+tp") continue;  // the exchange of the order
          collectives.push_back(fmt::format("{} {}", each.kind, each.mesh_dim));
          if (each.mesh_dim != "dp") bytes += each.bytes;
        }
        CAPTURE(counter.to_string());
        CHECK(collectives == row.wanted);
        // 12 x 16 + 12 + 16 x 10 + 16 numbers, and a flag for each of the four parameters.
        CHECK(static_cast<double>(bytes) == row.share * 8 * (192 + 12 + 160 + 16 + 4));
        ours.step();
        theirs.step();
        check_parameters(*module, *reference, /*gradients=*/false, 1e-11);
      }
    });
  }
}

TEST_CASE("data_placement: one reduce-scatter per bucket") {
  (void)cases();
  on_meshes([](const DeviceMesh& mesh) {
    Mlp module = mlp(), reference = mlp();
    auto parallel = parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}, kZero);
    CommCounter counter(mesh);
    for (int i = 0; i < 3; ++i) {
      CAPTURE(i);
      module->zero_grad();
      reference->zero_grad();
      const at::Tensor loss = loss_of(parallel, cases().rows, mesh);
      counter.reset();
      loss.backward();
      CAPTURE(counter.to_string());
      CHECK(counter.count("reduce_scatter") == (mesh.size(0) > 1 ? 1 : 0));
      step_of(reference);
      check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
    }
  });
}

TEST_CASE("several backward passes add up; under AccumulateGradients only the last one communicates") {
  (void)cases();
  for (const bool zero : {false, true}) {
    CAPTURE(zero);
    on_meshes([&](const DeviceMesh& mesh) {
      for (const bool guarded : {false, true}) {
        CAPTURE(guarded);
        Block module = block(), reference = block();
        auto parallel = parallelize_module(module, mesh, kSequence, zero ? kZero : ParallelizeOptions());
        CommCounter counter(mesh);
        for (int step = 0; step < 3; ++step) {
          CAPTURE(step);
          module->zero_grad();
          reference->zero_grad();
          for (int i = 0; i < 3; ++i) {
            const at::Tensor loss = loss_of(parallel, cases().sequences, mesh) * (i + 1);
            std::optional<AccumulateGradients> guard;
            if (guarded && i < 2) guard.emplace(mesh);
            counter.reset();
            loss.backward();
            CAPTURE(counter.to_string());
            if (guard) CHECK(counter.count_by_op("gradient") == 0);
            step_of(reference, i + 1);
          }
          for (const auto& item : module->named_parameters()) {
            CAPTURE(item.key());
            CHECK(placements_of(item.value().grad()) == placements_of(item.value()));
          }
          check_parameters(*module, *reference, /*gradients=*/true, 1e-11, kKeyBias);
        }
      }
    });
  }
}

TEST_CASE("a pass that reduces follows passes that only add up, also for parameters that it does not use") {
  (void)cases();
  on_meshes([](const DeviceMesh& mesh) {
    Mlp module = mlp(), reference = mlp();
    auto parallel = parallelize_module(module, mesh, {});
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      module->zero_grad();
      reference->zero_grad();
      {
        const AccumulateGradients guard(mesh);
        loss_of(parallel, cases().rows, mesh).backward();
      }
      step_of(reference);
      module->up->forward(piece(cases().rows, mesh)).square().mean().backward();
      reference->up->forward(cases().rows).square().mean().backward();
      check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
    }
  });
}

TEST_CASE("a parameter without a gradient on one rank counts as zero there; without one on any it keeps none") {
  (void)cases();
  for (const bool zero : {false, true}) {
    CAPTURE(zero);
    on_meshes(
        [&](const DeviceMesh& mesh) {
          Mlp module = mlp(), reference = mlp();
          const at::Tensor unused = module->register_parameter("unused", torch::ones({3}, on(at::kDouble)));
          // Operators with gathered parameters communicate, so every rank must take the same path there.
          auto parallel = parallelize_module(module, mesh, {}, zero ? kZero : ParallelizeOptions());
          const int64_t ranks = mesh.size(0), rank = mesh.local_rank("dp");
          const Placements rows = {Shard(0), Replicate()};
          for (int step = 0; step < 3; ++step) {
            CAPTURE(step);
            module->zero_grad();
            reference->zero_grad();
            // The coordinate `step` uses only `up`.
            const bool skips = !zero && rank == step % ranks && ranks > 1;
            const at::Tensor x = from_local(cases().two_rows, mesh, rows);
            at::Tensor y = module->up(x);
            if (!skips) y = module->down(at::gelu(y));
            y.square().sum().backward();
            const at::Tensor& plain = cases().two_rows;
            for (int64_t r = 0; r < ranks; ++r) {
              at::Tensor want = reference->up(plain);
              const bool skipped = !zero && r == step % ranks && ranks > 1;
              if (!skipped) want = reference->down(at::gelu(want));
              want.square().sum().backward();
            }
            for (const auto& item : reference->named_parameters()) {
              CAPTURE(item.key());
              const at::Tensor got = module->named_parameters()[item.key()].grad();
              REQUIRE(got.defined());
              CHECK(difference(got, item.value().grad()) <= 1e-11);
            }
            CHECK_FALSE(unused.grad().defined());
          }
        },
        {{2, 1}, {3, 1}, {4, 1}});
  }
}

TEST_CASE("in 16 bits too a parameter may have no gradient in a backward") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool parameters : {false, true}) {
      run_in_process(2, [&](const std::shared_ptr<World>& world) {
        const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
        torch::nn::Linear linear(4, 4), sometimes(4, 4);
        torch::nn::Sequential both(linear, sometimes);
        both->to(device(), parameters ? dtype : at::kFloat);
        auto parallel = parallelize_module(both, mesh, {}, {.gradient_buckets = {.dtype = dtype}});
        const at::Tensor x =
            from_local(at::ones({2, 4}, on(parameters ? dtype : at::kFloat)), mesh, {Shard(0), Replicate()});
        for (const bool all : {false, true, false}) {
          both->zero_grad();
          at::Tensor y = linear(x);
          if (all) y = sometimes(y);
          y.sum().backward();
          CHECK(linear->bias.grad().defined());
          CHECK(sometimes->bias.grad().defined() == all);
          if (!all) CHECK(full_tensor(linear->bias.grad()).to(at::kFloat).equal(at::full({4}, 4.0F, on(at::kFloat))));
        }
      });
    }
  }
}

TEST_CASE("torch::autograd::grad, create_graph and hooks see whole gradients in the parameter's layout") {
  (void)cases();
  on_meshes([](const DeviceMesh& mesh) {
    Mlp module = mlp(), reference = mlp();
    auto parallel = parallelize_module(module, mesh, {});
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      module->zero_grad();
      reference->zero_grad();
      const std::vector<at::Tensor> got =
          torch::autograd::grad({loss_of(parallel, cases().rows, mesh)}, module->parameters());
      step_of(reference);
      const std::vector<at::Tensor> wanted = reference->parameters();
      for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK(placements_of(got[i]) == placements_of(module->parameters()[i]));
        CHECK(difference(got[i], wanted[i].grad()) <= 1e-11);
        CHECK_FALSE(module->parameters()[i].grad().defined());
      }
      loss_of(parallel, cases().rows, mesh).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
      for (const at::Tensor& each : module->parameters()) CHECK(each.grad().requires_grad());
      module->zero_grad();
      // A backward pass may be for one parameter alone.
      loss_of(parallel, cases().rows, mesh).backward({}, std::nullopt, false, {{module->down->weight}});
      CHECK(difference(module->down->weight.grad(), reference->down->weight.grad()) <= 1e-11);
      CHECK_FALSE(module->up->weight.grad().defined());
    }
    module->zero_grad();
    at::Tensor seen;
    module->up->weight.register_hook([&](const at::Tensor& gradient) {
      seen = gradient;
      return gradient * 2;
    });
    loss_of(parallel, cases().rows, mesh).backward();
    CHECK(placements_of(seen) == placements_of(module->up->weight));
    CHECK(difference(seen, reference->up->weight.grad()) <= 1e-11);
    CHECK(difference(module->up->weight.grad(), 2 * reference->up->weight.grad()) <= 1e-11);
    CHECK(difference(module->down->weight.grad(), reference->down->weight.grad()) <= 1e-11);
  });
}

TEST_CASE("activation checkpoints: a tied weight whose gradient comes twice in one pass") {
  (void)cases();
  on_meshes([](const DeviceMesh& mesh) {
    Mlp module = mlp(), reference = mlp();
    parallelize_module(module, mesh, {});
    const auto loss = [&](Mlp& m, const at::Tensor& x) {
      const auto first = [&](const std::vector<at::Tensor>& in) {
        return std::vector{m->down(at::gelu(m->up(in[0])))};
      };
      const at::Tensor y = checkpoint(first, {x})[0];
      return checkpoint(
                 [&](const std::vector<at::Tensor>& in) { return std::vector{at::matmul(in[0], m->down->weight)}; },
                 {y})[0]
          .square()
          .mean();
    };
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      module->zero_grad();
      reference->zero_grad();
      loss(module, piece(cases().rows, mesh)).backward();
      loss(reference, cases().rows).backward();
      check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
    }
  });
}

namespace {

// Computes its module again in backward, by a backward pass of its own, as users' checkpoints do.
struct ModuleAgain : torch::autograd::Function<ModuleAgain> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const std::function<at::Tensor(const at::Tensor&)>& module) {
    ctx->save_for_backward({x});
    ctx->saved_data["module"] = reinterpret_cast<int64_t>(&module);
    return module(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto& module =
        *reinterpret_cast<const std::function<at::Tensor(const at::Tensor&)>*>(ctx->saved_data["module"].toInt());
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode recording(true);
    const at::Tensor y = module(x);
    y.backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace

TEST_CASE("a user's function that calls backward within backward: all gradients are there") {
  (void)cases();
  on_meshes([](const DeviceMesh& mesh) {
    Mlp module = mlp(), reference = mlp();
    parallelize_module(module, mesh, {});
    const auto loss = [](Mlp& m, const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& inner) {
      return m->down(at::gelu(ModuleAgain::apply(x.detach().requires_grad_(), inner))).square().mean();
    };
    const std::function<at::Tensor(const at::Tensor&)> ours = [&](const at::Tensor& x) { return module->up(x); };
    const std::function<at::Tensor(const at::Tensor&)> theirs = [&](const at::Tensor& x) { return reference->up(x); };
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      module->zero_grad();
      reference->zero_grad();
      loss(module, piece(cases().rows, mesh), ours).backward();
      loss(reference, cases().rows, theirs).backward();
      check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
    }
  });
}

TEST_CASE("a pass after one that threw starts anew") {
  (void)cases();
  on_meshes([](const DeviceMesh& mesh) {
    Mlp module = mlp(), reference = mlp();
    auto parallel = parallelize_module(module, mesh, {});
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      module->zero_grad();
      reference->zero_grad();
      const at::Tensor x = piece(cases().rows, mesh);
      const at::Tensor hidden = module->up(x);
      hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::domain_error("this hook throws"); });
      CHECK_THROWS_AS(module->down(at::gelu(hidden)).square().mean().backward(), std::domain_error);
      module->zero_grad();
      loss_of(parallel, cases().rows, mesh).backward();
      step_of(reference);
      check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
    }
  });
}

TEST_CASE("gradients can be sent in another dtype, and stay in the parameter's") {
  (void)cases();
  struct Row {
    at::ScalarType dtype;
    int64_t bytes;
    double tolerance;
  };
  for (const Row& row : {Row{at::kFloat, 4, 1e-6}, Row{at::kBFloat16, 2, 0.02}, Row{at::kHalf, 2, 0.004}}) {
    CAPTURE(row.bytes);
    on_meshes(
        [&](const DeviceMesh& mesh) {
          Mlp module = mlp(), reference = mlp();
          auto parallel = parallelize_module(module, mesh, {}, {.gradient_buckets = {.dtype = row.dtype}});
          const at::Tensor loss = loss_of(parallel, cases().rows, mesh);
          CommCounter counter(mesh);
          loss.backward();
          step_of(reference);
          int64_t numbers = 0;
          for (const at::Tensor& each : reference->parameters()) numbers += each.numel();
          CHECK(counter.bytes("all_reduce") ==
                row.bytes * (numbers + 4));  // and a flag for each of the four parameters
          for (const at::Tensor& each : module->parameters()) CHECK((each.grad().scalar_type() == at::kDouble));
          check_parameters(*module, *reference, /*gradients=*/true, row.tolerance);
        },
        {{2, 1}, {4, 1}});
  }
}

TEST_CASE("after module->to(dtype) gradients are reduced and kept in the new dtype") {
  (void)cases();
  on_meshes(
      [&](const DeviceMesh& mesh) {
        Mlp module = mlp(), reference = mlp();
        auto parallel = parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
        for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kDouble, at::kDouble}) {
          CAPTURE(c10::toString(dtype));
          module->to(dtype);
          reference->to(dtype);
          module->zero_grad();
          reference->zero_grad();
          loss_of(parallel, cases().rows.to(dtype), mesh).backward();
          reference->forward(cases().rows.to(dtype)).square().mean().backward();
          for (const auto& item : module->named_parameters()) CHECK((item.value().grad().scalar_type() == dtype));
          check_parameters(*module, *reference, /*gradients=*/true, dtype == at::kDouble ? 1e-11 : 1e-5);
        }
      },
      {{2, 1}, {3, 1}, {2, 2}});
}
