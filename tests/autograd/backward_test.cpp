// Tests what code does around backward: torch::autograd::grad, hooks, anomaly mode, modes without gradients,
// recomputation.

#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"

namespace tessera::testing {
namespace {

at::Tensor layers(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2) {
  return at::linear(at::gelu(at::linear(x, w1)), w2);
}

struct Whole {
  at::Tensor x = sample({5, 6}), w1 = sample({7, 6}, 1), w2 = sample({6, 7}, 2);
};

// Names the layouts of x, w1 and w2.
const std::vector<std::vector<Placement>> kLayouts = {{R, S0, S1}, {S0, R, R}, {S1, S1, S0}, {P, R, S0}};

}  // namespace

TEST_CASE("torch::autograd::grad: of some inputs, of what is not used, with the caller's own gradient") {
  on_lines([](const DeviceMesh& mesh) {
    for (const auto& layout : kLayouts) {
      const Whole whole;
      const auto run = [](const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& seed) {
        const at::Tensor y = layers(x, w1, w2);
        const at::Tensor unused = (x.detach() * 2).requires_grad_(true);
        return torch::autograd::grad({y}, {w1, unused, x}, {seed}, std::nullopt, false, /*allow_unused=*/true);
      };
      const at::Tensor seed = sample({5, 6}, 3);
      const at::Tensor x = leaf(whole.x, mesh, {layout[0]}), w1 = leaf(whole.w1, mesh, {layout[1]}),
                       w2 = leaf(whole.w2, mesh, {layout[2]});
      const Tensors want = run(leaf(whole.x), leaf(whole.w1), leaf(whole.w2), seed);
      for (const Placement& of_seed : {R, S0, P}) {
        CAPTURE(to_string(of_seed));
        const Tensors got = run(x, w1, w2, spread(seed, mesh, {of_seed}));
        CHECK(close(full_tensor(got[0]), want[0]));
        CHECK_FALSE(got[1].defined());
        CHECK(close(full_tensor(got[2]), want[2]));
        CHECK_FALSE(x.grad().defined());
      }
    }
  });
}

TEST_CASE("register_hook: on leaves and on results; what a hook returns is the gradient") {
  on_lines([](const DeviceMesh& mesh) {
    for (const auto& layout : kLayouts) {
      const Whole whole;
      const auto run = [](const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2) {
        const at::Tensor hidden = at::gelu(at::linear(x, w1));
        Tensors seen(2);
        hidden.register_hook([](const at::Tensor& grad) { return grad * 2 + 1; });
        hidden.register_hook([&seen](const at::Tensor& grad) { seen[0] = grad.detach().clone(); });
        w1.register_hook([&seen](const at::Tensor& grad) {
          seen[1] = grad.detach().clone();
          return grad.clamp(-0.5, 0.5);
        });
        const unsigned gone = x.register_hook([](const at::Tensor& grad) { return grad * 1000; });
        x.remove_hook(gone);
        at::linear(hidden, w2).pow(2).sum().backward();
        seen.insert(seen.end(), {x.grad(), w1.grad(), w2.grad()});
        return seen;
      };
      const Tensors want = run(leaf(whole.x), leaf(whole.w1), leaf(whole.w2));
      const Tensors got =
          run(leaf(whole.x, mesh, {layout[0]}), leaf(whole.w1, mesh, {layout[1]}), leaf(whole.w2, mesh, {layout[2]}));
      for (std::size_t i = 0; i < want.size(); ++i) {
        CAPTURE(i);
        CHECK(is_dtensor(got[i]));
        CHECK(close(full_tensor(got[i]), want[i]));
      }
      for (std::size_t i = 0; i < 3; ++i) CHECK(placements_of(got[2 + i]) == without_partial({layout[i]}));
    }
  });
}

TEST_CASE(
    "register_hook before and after the first use, and one that returns another layout: the gradient is the leaf's") {
  on_lines([](const DeviceMesh& mesh) {
    for (const Placement& placement : {R, S0, S1}) {
      for (const bool before : {true, false}) {
        CAPTURE(to_string(placement));
        CAPTURE(before);
        const auto run = [&](const at::Tensor& w, const at::Tensor& x, bool distributed) {
          std::vector<Placements> seen;
          const auto add_hook = [&] {
            w.register_hook([&seen, distributed](const at::Tensor& grad) {
              if (!distributed) return grad * 3;
              seen.push_back(placements_of(grad));
              return redistribute(grad, {S0}) * 3;
            });
          };
          if (before) add_hook();
          const at::Tensor y = at::linear(x, w);
          if (!before) add_hook();
          y.pow(2).sum().backward();
          at::linear(x, w).sum().backward();  // the second use
          if (distributed) CHECK(seen == std::vector<Placements>(2, {placement}));
          return w.grad();
        };
        const at::Tensor want = run(leaf(sample({4, 5})), sample({6, 5}, 1), false);
        const at::Tensor got =
            run(leaf(sample({4, 5}), mesh, {placement}), spread(sample({6, 5}, 1), mesh, {S0}), true);
        CHECK(placements_of(got) == Placements{placement});
        CHECK(close(full_tensor(got), want));
      }
    }
  });
}

namespace {

// Catches the traces that anomaly mode prints before it throws.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

TEST_CASE("anomaly mode: the same gradients; a NaN in one rank's piece is an error on all") {
  const torch::autograd::DetectAnomalyGuard anomaly;  // anomaly mode is set for the process
  on_lines([](const DeviceMesh& mesh) {
    Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard handler(&quiet);
    for (const auto& layout : kLayouts) {
      const Whole whole;
      beside_plain(mesh, {{whole.x, {layout[0]}}, {whole.w1, {layout[1]}}, {whole.w2, {layout[2]}}},
                   [](const Tensors& t) { return layers(t[0], t[1], t[2]); });
    }
    at::Tensor zeros = sample({5, 3});
    zeros[4][1] = 0;
    for (const Placement& placement : {S0, S1, R}) {
      CAPTURE(to_string(placement));
      const at::Tensor x = leaf(zeros, mesh, {placement});
      const at::Tensor loss = (x * 0 / x).sum() + x.sum();  // 0 / 0 in one element
      CHECK_THROWS_WITH((x.abs().sqrt() * 0).sum().backward(), doctest::Contains("returned nan values"));
      CHECK_THROWS_WITH(loss.backward(), doctest::Contains("returned nan values"));
    }
    // The job goes on after the error.
    CHECK(close(full_tensor(leaf(zeros, mesh, {S0}).sum().detach()), zeros.sum()));
  });
}

TEST_CASE("no_grad and InferenceMode: operators give what they give under autograd") {
  on_lines([](const DeviceMesh& mesh) {
    const at::Tensor whole = sample({6, 5}), w = sample({4, 5}, 1), image = sample({2, 3, 6, 6}, 2),
                     filter = sample({4, 3, 3, 3}, 3);
    const std::vector<std::pair<const char*, Operator>> operators = {
        {"linear", [](const Tensors& t) { return at::linear(t[0], t[1]); }},
        {"views",
         [](const Tensors& t) {
           return t[0].t().reshape({-1}).view({3, 10}).slice(1, 2, 9) + 1;
         }},
        {"in place", [](const Tensors& t) { return t[0].clone().mul_(2).add_(1).slice(0, 1, 4).sub_(3); }},
        {"softmax", [](const Tensors& t) { return at::softmax(t[0], 0); }},
        {"norm", [](const Tensors& t) { return at::layer_norm(t[0], {5}); }},
        {"conv2d", [](const Tensors& t) { return at::conv2d(t[2], t[3]); }},
        {"attention", [](const Tensors& t) { return at::scaled_dot_product_attention(t[2], t[2], t[2]); }},
        {"split", [](const Tensors& t) { return at::cat(t[0].split(2, 0), 1); }},
    };
    for (const Placement& first : {S0, S1, R, P}) {
      for (const auto& row : operators) {
        CAPTURE(row.first);
        const auto& f = row.second;
        CAPTURE(to_string(first));
        const Tensors plain = {whole, w, image, filter};
        const at::Tensor want = f(plain);
        const auto run = [&] {
          return f(
              {leaf(whole, mesh, {first}), leaf(w, mesh, {R}), leaf(image, mesh, {first}), leaf(filter, mesh, {R})});
        };
        {
          const at::NoGradGuard no_grad;
          const at::Tensor got = run();
          CHECK_FALSE(got.requires_grad());
          CHECK(close(full_tensor(got), want));
        }
        {
          const c10::InferenceMode inference;
          const at::Tensor got = run();
          CHECK(got.is_inference());
          CHECK(close(full_tensor(got), want));
        }
        CHECK(close(full_tensor(run().detach()), want));
      }
    }
  });
}

namespace {

at::Tensor with_dropout(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2) {
  return at::linear(at::dropout(at::gelu(at::linear(x, w1)), 0.4, true), w2);
}

// Does what an activation checkpoint does: runs forward without gradients, and in backward runs it again with the same
// random numbers.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w1,
                            const at::Tensor& w2) {
    const RandomState state = mesh_of(x).world().random_state();
    ctx->saved_data["seed"] = static_cast<int64_t>(state.seed);
    ctx->saved_data["counter"] = static_cast<int64_t>(state.counter);
    ctx->save_for_backward({x, w1, w2});
    const at::NoGradGuard no_grad;
    return with_dropout(x, w1, w2);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    Tensors again;
    for (const at::Tensor& t : ctx->get_saved_variables()) again.push_back(t.detach().requires_grad_(true));
    RandomState& state = mesh_of(again[0]).world().random_state();
    const RandomState now = state;
    state = {.seed = static_cast<uint64_t>(ctx->saved_data["seed"].toInt()),
             .counter = static_cast<uint64_t>(ctx->saved_data["counter"].toInt())};
    const at::AutoGradMode enabled(true);
    const at::Tensor y = with_dropout(again[0], again[1], again[2]);
    state = now;
    return torch::autograd::grad({y}, again, {grads[0]});
  }
};

}  // namespace

TEST_CASE("recomputation with dropout: the random state, saved and restored, gives the same draws") {
  on_lines([](const DeviceMesh& mesh) {
    for (const auto& layout : kLayouts) {
      const Whole whole;
      const auto run = [&](bool recompute) {
        manual_seed(17, mesh.world());
        const at::Tensor x = leaf(whole.x, mesh, {layout[0]}), w1 = leaf(whole.w1, mesh, {layout[1]}),
                         w2 = leaf(whole.w2, mesh, {layout[2]});
        at::Tensor y = x;
        for (int layer = 0; layer < 2; ++layer) y = recompute ? Checkpoint::apply(y, w1, w2) : with_dropout(y, w1, w2);
        const RandomState before = mesh.world().random_state();
        y.pow(2).sum().backward();
        CHECK(mesh.world().random_state().counter == before.counter);
        CHECK(before.counter == 2);
        Tensors out = {full_tensor(y.detach())};
        for (const at::Tensor& t : {x, w1, w2}) {
          out.push_back(full_tensor(t.grad()));
          CHECK(placements_of(t.grad()) == without_partial(placements_of(t)));
        }
        out.push_back(full_tensor(at::dropout(spread(at::ones({6, 6}, on(at::kDouble)), mesh, {S0}), 0.5, true)));
        return out;
      };
      const Tensors direct = run(false), recomputed = run(true);
      CHECK((direct[0] == 0).sum().item<int64_t>() < direct[0].numel());
      for (std::size_t i = 0; i < direct.size(); ++i) CHECK(close(recomputed[i], direct[i]));
    }
  });
}

namespace {

// Reads its second gradient, which is a plain tensor of zeros if nothing used the second result.
struct Pair : torch::autograd::Function<Pair> {
  static torch::autograd::tensor_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                              bool materialize) {
    ctx->set_materialize_grads(materialize);
    return {x * 2, x * 3};
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list& grads) {
    at::Tensor out = grads[0] * 2;
    if (grads[1].defined()) out = out + distribute_tensor(full_tensor(grads[1]) * 3, mesh_of(out), {Replicate()});
    return {out, at::Tensor()};
  }
};

}  // namespace

TEST_CASE("a Function with a result that nothing used: the error names set_materialize_grads") {
  on_lines([](const DeviceMesh& mesh) {
    const at::Tensor x = leaf(sample({5, 6}), mesh, {S0});
    CHECK_THROWS_WITH_AS(Pair::apply(x, true)[0].sum().backward(),
                         doctest::Contains("ctx->set_materialize_grads(false)"), std::invalid_argument);
    Pair::apply(x, false)[0].sum().backward();
    CHECK(close(full_tensor(x.grad()), at::full({5, 6}, 2.0, on(at::kDouble))));
  });
}

}  // namespace tessera::testing
