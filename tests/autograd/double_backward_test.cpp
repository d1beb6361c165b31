// Tests gradients of gradients, of operators and of a block under styles, against plain tensors.

#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"
#include "tessera/tests/styles/blocks.h"

namespace tessera::testing {
namespace {

constexpr double kTolerance = 1e-10;

struct TwiceRow {
  std::string name;
  Tensors operands;
  Operator f;
};

at::Tensor attention(const Tensors& t) { return std::get<0>(at::_scaled_dot_product_attention_math(t[0], t[1], t[2])); }

// Every operand gets a gradient, and each gradient has gradients itself.
std::vector<TwiceRow> twice_table() {
  const at::Tensor x = sample({6, 5}), y = sample({6, 5}, 1), w = sample({4, 5}, 2), row = sample({5}, 3),
                   four = sample({4}, 4);
  const at::Tensor image = sample({4, 2, 5, 5}, 5), filter = sample({3, 2, 3, 3}, 6);
  const at::Tensor q = sample({4, 2, 3, 4}, 7), k = sample({4, 2, 3, 4}, 8), v = sample({4, 2, 3, 4}, 9);
  const at::Tensor rows = at::tensor({3, 0, 3, 5}, on(at::kLong));
  const auto index = [rows](const at::Tensor& like) {
    if (!is_dtensor(like)) return rows;
    const DeviceMesh& mesh = mesh_of(like);
    return spread(rows, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), R));
  };
  const auto classes = [](const at::Tensor& like) {
    const at::Tensor whole = at::tensor({1, 4, 0, 2, 2, -100}, on(at::kLong));
    if (!is_dtensor(like)) return whole;
    const DeviceMesh& mesh = mesh_of(like);
    return spread(whole, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), R));
  };
  return {
      {"mul", {x, y}, [](const Tensors& t) { return t[0] * t[1]; }},
      {"div", {x, y}, [](const Tensors& t) { return t[0] / (t[1] + 3); }},
      {"tanh", {x}, [](const Tensors& t) { return t[0].tanh(); }},
      {"gelu", {x}, [](const Tensors& t) { return at::gelu(t[0]); }},
      {"silu", {x}, [](const Tensors& t) { return at::silu(t[0]); }},
      {"sum", {x}, [](const Tensors& t) { return t[0].pow(3).sum(0); }},
      {"mean", {x}, [](const Tensors& t) { return t[0].exp().mean(1); }},
      {"var", {x}, [](const Tensors& t) { return t[0].var(0); }},
      {"norm", {x}, [](const Tensors& t) { return at::linalg_vector_norm(t[0], 2, at::IntArrayRef{1}); }},
      {"softmax", {x}, [](const Tensors& t) { return at::softmax(t[0], 1); }},
      {"log_softmax", {x}, [](const Tensors& t) { return at::log_softmax(t[0], 0); }},
      {"matmul", {x, w}, [](const Tensors& t) { return at::matmul(t[0], t[1].t()); }},
      {"linear", {x, w, four}, [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }},
      {"linear of three dimensions",
       {sample({2, 3, 5}), w, four},
       [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }},
      {"layer_norm", {x, row, row * 2}, [](const Tensors& t) { return at::layer_norm(t[0], {5}, t[1], t[2]); }},
      {"cross_entropy", {x}, [classes](const Tensors& t) { return at::cross_entropy_loss(t[0], classes(t[0])); }},
      {"mse_loss", {x, y}, [](const Tensors& t) { return at::mse_loss(t[0], t[1]); }},
      {"attention", {q, k, v}, attention},
      {"conv2d", {image, filter}, [](const Tensors& t) { return at::conv2d(t[0], t[1]); }},
      {"index_select", {x}, [index](const Tensors& t) { return at::index_select(t[0], 0, index(t[0])).sin(); }},
      {"embedding", {x}, [index](const Tensors& t) { return at::embedding(t[0], index(t[0])).sin(); }},
      {"cat and transpose",
       {x, y},
       [](const Tensors& t) {
         return at::cat({t[0], t[1].sin()}, 0).t().pow(2);
       }},
      {"slice", {x}, [](const Tensors& t) { return t[0].slice(0, 1, 5).cos() * t[0].select(0, 0); }},
  };
}

at::Tensor weights(const at::Tensor& like, int64_t seed) {
  const at::Tensor whole = sample(like.sizes(), seed);
  if (!is_dtensor(like)) return whole;
  const DeviceMesh& mesh = mesh_of(like);
  return spread(whole, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), R));
}

// Returns the first gradients, then the gradients of a sum of functions of these.
Tensors both_gradients(const Operator& f, const Tensors& leaves) {
  const at::Tensor y = f(leaves);
  const Tensors first = torch::autograd::grad({(y * weights(y, 20)).sum()}, leaves, {}, true, /*create_graph=*/true);
  at::Tensor penalty;
  for (std::size_t i = 0; i < first.size(); ++i) {
    const at::Tensor each = (first[i].sin() * weights(first[i], 30 + static_cast<int64_t>(i))).sum();
    penalty = penalty.defined() ? penalty + each : each;
  }
  penalty.backward();
  Tensors out;
  for (const at::Tensor& t : first) out.push_back(t.detach());
  for (const at::Tensor& t : leaves) out.push_back(t.grad());
  return out;
}

void check(const DeviceMesh& mesh, const TwiceRow& row, const std::vector<Placements>& placements) {
  Tensors plain, leaves;
  for (std::size_t i = 0; i < row.operands.size(); ++i) {
    plain.push_back(leaf(row.operands[i]));
    leaves.push_back(leaf(row.operands[i], mesh, placements[i]));
  }
  const Tensors want = both_gradients(row.f, plain), got = both_gradients(row.f, leaves);
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CHECK(got[i].defined() == want[i].defined());
    if (!got[i].defined() || !want[i].defined()) continue;
    CHECK(close(full_tensor(got[i]), want[i], kTolerance));
  }
}

}  // namespace

TEST_CASE("gradients of gradients of operators, on each layout") {
  on_lines([](const DeviceMesh& mesh) {
    for (const TwiceRow& row : twice_table()) {
      CAPTURE(row.name);
      for (const Placement& first : {S0, S1, R, P}) {
        for (const Placement& others : {R, S0}) {
          if (row.operands.size() == 1 && others != R) continue;
          CAPTURE(to_string(first));
          CAPTURE(to_string(others));
          std::vector<Placements> placements(row.operands.size(), {others});
          placements[0] = {first};
          check(mesh, row, placements);
        }
      }
    }
  });
}

TEST_CASE("gradients of gradients of operators on 2 x 2") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const TwiceRow& row : twice_table()) {
      CAPTURE(row.name);
      for (const Placements& first : {Placements{S0, S0}, {S0, S1}, {R, S1}, {P, S0}}) {
        CAPTURE(to_string(first));
        std::vector<Placements> placements(row.operands.size(), {R, S0});
        placements[0] = first;
        check(mesh, row, placements);
      }
    }
  });
}

TEST_CASE("a penalty on the gradient of a transformer block's input, under styles") {
  on_lines([](const DeviceMesh& mesh) {
    const ParallelPlan whole = {{"attn.w[qkv]", ColwiseParallel()},
                                {"attn.wo", RowwiseParallel()},
                                {"mlp.up", ColwiseParallel()},
                                {"mlp.down", RowwiseParallel()}};
    const ParallelPlan sequence = {{"norm?", SequenceParallel()},
                                   {"attn.w[qkv]", ColwiseParallel({.input_layouts = S1})},
                                   {"attn.wo", RowwiseParallel({.output_layouts = S1})},
                                   {"mlp.up", ColwiseParallel({.input_layouts = S1})},
                                   {"mlp.down", RowwiseParallel({.output_layouts = S1})}};
    static std::mutex mutex;  // the numbers are drawn from the process's generator
    for (const bool cut : {false, true}) {
      CAPTURE(cut);
      Block want{nullptr}, got{nullptr};
      {
        const std::lock_guard lock(mutex);
        want = Block(12, 12, 24);
        got = Block(12, 12, 24);
        fill(*want);
        fill(*got);
      }
      auto tp = parallelize_module(got, mesh, cut ? sequence : whole);
      const auto penalized = [](const at::Tensor& x, const at::Tensor& y) {
        const at::Tensor loss = y.pow(2).sum();
        const Tensors grads = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
        (loss + grads[0].pow(2).sum()).backward();
      };
      const at::Tensor x = sample({2, 5, 12}), plain = leaf(x), mine = leaf(x, mesh, {cut ? S1 : R});
      penalized(plain, want->forward(plain));
      penalized(mine, tp(mine));
      CHECK(difference(mine.grad(), plain.grad()) <= 1e-11);
      // A key's bias adds the same to all scores of a row, so its gradient is zero up to rounding.
      check_parameters(*got, *want, /*gradients=*/true, 1e-11, {"wk.bias"});
    }
  });
}

TEST_CASE("a penalty on the gradient of a plain input, under styles") {
  on_lines([](const DeviceMesh& mesh) {
    static std::mutex mutex;
    Mlp want{nullptr}, got{nullptr};
    {
      const std::lock_guard lock(mutex);
      want = Mlp(10, 16, 12);
      got = Mlp(10, 16, 12);
      fill(*want);
      fill(*got);
    }
    auto tp = parallelize_module(got, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    for (const auto& shape : {std::vector<int64_t>{6, 10}, std::vector<int64_t>{2, 3, 10}}) {
      const auto penalized = [](const at::Tensor& x, const at::Tensor& y) {
        const Tensors grads = torch::autograd::grad({y.pow(2).sum()}, {x}, {}, true, /*create_graph=*/true);
        grads[0].pow(2).sum().backward();
      };
      const at::Tensor plain = leaf(sample(shape)), mine = leaf(sample(shape));
      penalized(plain, want->forward(plain));
      penalized(mine, tp(mine));
      CHECK_FALSE(is_dtensor(mine.grad()));
      CHECK(difference(mine.grad(), plain.grad()) <= 1e-11);
      check_parameters(*got, *want, /*gradients=*/true, 1e-11);
    }
  });
}

}  // namespace tessera::testing
