// Tests autograd through DTensors.

#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Computes two layers, as a feed-forward block does.
at::Tensor layers(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2) {
  return at::matmul(at::gelu(at::matmul(x, w1.t())), w2.t());
}

// Runs f in forward, and again in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w1,
                            const at::Tensor& w2) {
    ctx->save_for_backward({x, w1, w2});
    return layers(x, w1, w2);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    std::vector<at::Tensor> again;
    for (const at::Tensor& t : ctx->get_saved_variables()) again.push_back(t.detach().requires_grad_(true));
    const at::AutoGradMode enabled(true);
    const at::Tensor y = layers(again[0], again[1], again[2]);
    return torch::autograd::grad({y}, again, {grads[0]});
  }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("a tied weight's gradient is reduced once, after its uses are summed", {2, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({8, 6});
  const auto run = [](const at::Tensor& a, const at::Tensor& w) {
    return at::matmul(at::matmul(a, w), w.t()).pow(2).sum();
  };
  const at::Tensor want_w = leaf(sample({6, 5}, 1));
  run(x, want_w).backward();
  const at::Tensor w = leaf(sample({6, 5}, 1), mesh, {R});
  const at::Tensor loss = run(spread(x, mesh, {S0}), w);
  CommCounter counter(mesh);
  loss.backward();
  CHECK(counter.count_by_op("gradient") == 1);
  CHECK(counter.total() == 1);
  CHECK(counter.count("all_reduce") == 1);
  CHECK(placements_of(w.grad()) == Placements{R});
  CHECK(close(full_tensor(w.grad()), want_w.grad()));
}

TESSERA_RANKS_TEST_CASE("gradients accumulate over backwards and microbatches", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor want = leaf(sample({6, 5}));
  const at::Tensor w = leaf(sample({6, 5}), mesh, {S1});
  for (int64_t i = 0; i < 3; ++i) {
    at::matmul(sample({4, 6}, i), want).pow(2).sum().backward();
    at::matmul(spread(sample({4, 6}, i), mesh, {S0}), w).pow(2).sum().backward();
  }
  CHECK(placements_of(w.grad()) == Placements{S1});
  CHECK(close(full_tensor(w.grad()), want.grad()));
}

TESSERA_RANKS_TEST_CASE("determinants of parts of tensors have the gradient of the whole", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor wide = sample({3, 6}), many = sample({5, 2, 3, 3});
  using Part = std::function<at::Tensor(const at::Tensor&)>;
  using Forward = std::function<at::Tensor(const at::Tensor&)>;
  const Part columns = [](const at::Tensor& x) { return x.narrow(1, 1, 3); };
  const Part one_of_two = [](const at::Tensor& x) { return x.select(1, 0); };
  const Part turned = [](const at::Tensor& x) { return x.select(1, 1).mT(); };
  const Forward det = [](const at::Tensor& x) { return at::linalg_det(x).sum(); };
  const Forward slogdet = [](const at::Tensor& x) { return std::get<1>(at::linalg_slogdet(x)).sum(); };
  for (const auto& [whole, part] :
       std::vector<std::pair<at::Tensor, Part>>{{wide, columns}, {many, one_of_two}, {many, turned}}) {
    for (const Placement& placement : {Placement(R), Placement(S0)}) {
      for (const Forward& forward : {det, slogdet}) {
        const at::Tensor ours = leaf(whole, mesh, {placement}), plain = leaf(whole);
        forward(part(ours)).backward();
        forward(part(plain)).backward();
        CHECK(close(full_tensor(ours.grad()), plain.grad(), 1e-9));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("retain_grad, autograd::grad and gradients of gradients", {1, 2, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& of_x : all_layouts(mesh.ndim(), {R, S0, P})) {
      for (const Placements& of_w : all_layouts(mesh.ndim(), {R, S1})) {
        CAPTURE(to_string(of_x));
        CAPTURE(to_string(of_w));
        const auto run = [](const at::Tensor& x, const at::Tensor& w, bool distributed) {
          const at::Tensor y = at::tanh(at::matmul(x, w));
          y.retain_grad();
          const at::Tensor loss = y.pow(3).sum();
          const auto first = torch::autograd::grad({loss}, {x, w}, {}, true, true);
          (first[0].pow(2).sum() + first[1].sin().sum()).backward();
          const auto whole = [&](const at::Tensor& t) { return distributed ? full_tensor(t.detach()) : t.detach(); };
          return std::vector<at::Tensor>{whole(first[0]), whole(first[1]), whole(x.grad()), whole(w.grad()),
                                         whole(y.grad())};
        };
        const auto want = run(leaf(sample({5, 3})), leaf(sample({3, 4}, 1)), false);
        const auto got = run(leaf(sample({5, 3}), mesh, of_x), leaf(sample({3, 4}, 1), mesh, of_w), true);
        for (std::size_t i = 0; i < want.size(); ++i) CHECK(close(got[i], want[i], 1e-11));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("without gradients, in InferenceMode and under autocast the values are the same", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const bool three_dims : {false, true}) {
    const at::Tensor x = three_dims ? sample({2, 5, 6}) : sample({5, 6});
    const at::Tensor w1 = sample({7, 6}, 1);
    const at::Tensor w2 = sample({6, 7}, 2);
    const at::Tensor want = layers(x, w1, w2);
    const at::Tensor dw1 = leaf(w1, mesh, {S0});
    const at::Tensor dw2 = leaf(w2, mesh, {S1});
    const auto run = [&] { return layers(spread(x, mesh, {R}), dw1, dw2); };
    {
      const at::NoGradGuard no_grad;
      const at::Tensor y = run();
      CHECK_FALSE(y.requires_grad());
      CHECK(close(full_tensor(y), want));
    }
    {
      const c10::InferenceMode inference;
      const at::Tensor y = run();
      CHECK(y.is_inference());
      CHECK(close(full_tensor(y), want));
      CHECK(close(full_tensor(at::layer_norm(y, {6})), at::layer_norm(want, {6})));
    }
    const c10::DeviceType here = device().type();
    const bool before = at::autocast::is_autocast_enabled(here);
    at::autocast::set_autocast_enabled(here, true);
    at::autocast::set_autocast_dtype(here, at::kBFloat16);
    const at::Tensor low = layers(x.to(at::kFloat), w1.to(at::kFloat), w2.to(at::kFloat));
    const at::Tensor fw1 = leaf(w1.to(at::kFloat), mesh, {S0});
    const at::Tensor fw2 = leaf(w2.to(at::kFloat), mesh, {S1});
    const at::Tensor got = layers(spread(x.to(at::kFloat), mesh, {R}), fw1, fw2);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(here, before);
    CHECK((got.scalar_type() == low.scalar_type()));
    CHECK(close(full_tensor(got.detach()), low, 0.03));
    got.sum().backward();
    CHECK((fw1.grad().scalar_type() == at::kFloat));
    CHECK(placements_of(fw1.grad()) == Placements{S0});
  }
}

TESSERA_RANKS_TEST_CASE("recomputation in backward gives the same gradients, in the leaves' layouts", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const auto want_x = leaf(sample({5, 6}));
  const auto want_w1 = leaf(sample({7, 6}, 1));
  const auto want_w2 = leaf(sample({6, 7}, 2));
  layers(want_x, want_w1, want_w2).pow(2).sum().backward();
  const at::Tensor x = leaf(sample({5, 6}), mesh, {R});
  const at::Tensor w1 = leaf(sample({7, 6}, 1), mesh, {S0});
  const at::Tensor w2 = leaf(sample({6, 7}, 2), mesh, {S1});
  Recomputed::apply(x, w1, w2).pow(2).sum().backward();
  CHECK(placements_of(x.grad()) == Placements{R});
  CHECK(placements_of(w1.grad()) == Placements{S0});
  CHECK(close(full_tensor(x.grad()), want_x.grad()));
  CHECK(close(full_tensor(w1.grad()), want_w1.grad()));
  CHECK(close(full_tensor(w2.grad()), want_w2.grad()));
}

TESSERA_RANKS_TEST_CASE("a plain operand's gradient is plain and whole", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({5, 3});
  const auto run = [](const at::Tensor& a, const at::Tensor& scale, const at::Tensor& bias) {
    return (a * scale + bias).pow(2).sum();
  };
  const at::Tensor want_scale = leaf(sample({}, 1));
  const at::Tensor want_bias = leaf(sample({3}, 2));
  run(x, want_scale, want_bias).backward();
  for (const Placement& placement : {S0, S1, R, P}) {
    CAPTURE(to_string(placement));
    const at::Tensor scale = leaf(sample({}, 1));
    const at::Tensor bias = leaf(sample({3}, 2));
    at::Tensor loss;
    {
      const ImplicitReplication guard;
      loss = run(spread(x, mesh, {placement}), scale, bias);
    }
    loss.backward();  // after the guard has ended
    CHECK_FALSE(is_dtensor(scale.grad()));
    CHECK_FALSE(is_dtensor(bias.grad()));
    CHECK(close(scale.grad(), want_scale.grad()));
    CHECK(close(bias.grad(), want_bias.grad()));
    // The same holds for a result of plain operators.
    const at::Tensor again = leaf(sample({3}, 2));
    {
      const ImplicitReplication guard;
      loss = run(spread(x, mesh, {placement}), sample({}, 1), again * 2);
    }
    loss.backward();
    const at::Tensor want = leaf(sample({3}, 2));
    run(x, sample({}, 1), want * 2).backward();
    CHECK(close(again.grad(), want.grad()));
  }
}

TESSERA_RANKS_TEST_CASE(
    "a plain tensor that forward took as replicated is taken so by backward after the guard has ended", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor mask = whole_numbers({4, 4}, at::kBool);
  const at::Tensor ids = at::tensor({3, 0, 1, 1}, on(at::kLong));
  const auto run = [&](const at::Tensor& q, const at::Tensor& table) {
    const at::Tensor scores = at::matmul(q, q.transpose(-2, -1)).masked_fill(mask, -3.0);
    const at::Tensor rows = at::embedding(table, ids);
    const at::Tensor y = at::scaled_dot_product_attention(q, q, q, mask.logical_not().to(at::kDouble));
    return scores.softmax(-1).pow(2).sum() + rows.pow(2).sum() + y.pow(2).sum() +
           at::cross_entropy_loss(rows, ids.remainder(3));
  };
  const at::Tensor want_q = leaf(sample({2, 2, 4, 3}));
  const at::Tensor want_table = leaf(sample({5, 3}, 1));
  run(want_q, want_table).backward();
  const at::Tensor q = leaf(sample({2, 2, 4, 3}), mesh, {S1});
  const at::Tensor table = leaf(sample({5, 3}, 1), mesh, {S0});
  at::Tensor loss;
  {
    const ImplicitReplication guard;
    loss = run(q, table);
  }
  loss.backward();
  CHECK(close(full_tensor(q.grad()), want_q.grad()));
  CHECK(close(full_tensor(table.grad()), want_table.grad()));
}

TESSERA_RANKS_TEST_CASE("from_local and to_local return and take gradients in the layouts of grad_placements", {2, 4}) {
  const DeviceMesh mesh = line();
  const auto n = static_cast<double>(mesh.size());
  at::Tensor piece = at::ones({2, 3}, on(at::kDouble)).requires_grad_(true);
  to_local(from_local(piece, mesh, {S0}) * 2).sum().backward();
  CHECK(same(piece.grad(), at::full({2, 3}, 2.0, on(at::kDouble))));
  // The gradient of a Partial is replicated.
  piece = at::ones({2, 3}, on(at::kDouble)).requires_grad_(true);
  (from_local(piece, mesh, {P}) * 2).sum().backward();
  CHECK(same(piece.grad(), at::full({2, 3}, 2.0, on(at::kDouble))));
  // An average's gradient is the value's divided by the number of pieces; pieces that share the maximum share its
  // gradient.
  piece = at::ones({2, 3}, on(at::kDouble)).requires_grad_(true);
  (from_local(piece, mesh, {Partial(ReduceOp::kAvg)}) * 2).sum().backward();
  CHECK(close(piece.grad(), at::full({2, 3}, 2.0 / n, on(at::kDouble))));
  piece = at::ones({2, 3}, on(at::kDouble)).requires_grad_(true);
  (from_local(piece, mesh, {Partial(ReduceOp::kMax)}) * 2).sum().backward();
  CHECK(close(piece.grad(), at::full({2, 3}, 2.0 / n, on(at::kDouble))));
  // For a replicated value used as a term, the caller may say that its gradient is a sum over ranks.
  at::Tensor whole = leaf(sample({4, 3}), mesh, {R});
  to_local(whole, Placements{P}).sum().backward();
  CHECK(close(full_tensor(whole.grad()), at::full({4, 3}, n, on(at::kDouble))));
  piece = at::ones({4, 3}, on(at::kDouble)).requires_grad_(true);
  FromLocalOptions options;
  options.grad_placements = Placements{P};
  const CommCounter counter(mesh);
  to_local(from_local(piece, mesh, {R}, options)).sum().backward();
  CHECK(counter.total() == 0);
}

TESSERA_RANKS_TEST_CASE("a piece of a pending reduction that comes back has the value's gradient", {1, 2, 3, 4}) {
  const auto out_and_back = [](const at::Tensor& x) {
    return from_local(to_local(x), mesh_of(x), placements_of(x), {.shape = x.sizes().vec()});
  };
  for (const DeviceMesh& mesh : meshes()) {
    const auto ndim = static_cast<std::size_t>(mesh.ndim());
    Placements mixed(ndim, P);
    mixed[0] = Partial(ReduceOp::kAvg);
    for (const Placements& placements : {Placements(ndim, P), Placements(ndim, Partial(ReduceOp::kAvg)), mixed}) {
      CAPTURE(to_string(placements));
      const at::Tensor x = leaf(sample({5, 3}), mesh, placements);
      const at::Tensor weight = spread(sample({5, 3}, 1), mesh, Placements(ndim, R));
      (out_and_back(x) * weight).sum().backward();
      CHECK(close(full_tensor(x.grad()), sample({5, 3}, 1)));
    }
    // The derivative with respect to a piece of a maximum does not tell the value's.
    const Placements most(ndim, Partial(ReduceOp::kMax));
    const at::Tensor x = leaf(sample({5, 3}), mesh, most);
    CHECK_THROWS_WITH_AS(to_local(x).sum().backward(), doctest::Contains("does not give the gradient of the value"),
                         std::runtime_error);
    to_local(x, Placements(ndim, R)).sum().backward();
    CHECK(close(full_tensor(x.grad()), at::ones({5, 3}, on(at::kDouble))));
  }
}

TESSERA_RANKS_TEST_CASE("a leaf's gradient is a DTensor of its layout, whatever the leaf and the root are", {2, 3}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {R, S0, P}) {
    CAPTURE(to_string(placement));
    const Placements want = {placement.is_partial() ? R : placement};
    // The caller passes a plain gradient of the loss.
    const at::Tensor x = leaf(sample({5, 3}), mesh, {placement});
    x.sum().backward(at::full({}, 2.0, on(at::kDouble)));
    CHECK(placements_of(x.grad()) == want);
    CHECK(close(full_tensor(x.grad()), at::full({5, 3}, 2.0, on(at::kDouble))));
    // A view of a tensor without a gradient is a leaf too.
    const at::Tensor turned = spread(sample({3, 5}), mesh, {placement.is_shard() ? S1 : placement}).t();
    turned.requires_grad_(true);
    (turned * spread(sample({5, 3}, 1), mesh, {S1})).sum().backward();
    CHECK(placements_of(turned.grad()) == want);
    CHECK(close(full_tensor(turned.grad()), sample({5, 3}, 1)));
  }
  // A parameter may be used as a plain tensor before it is distributed in place.
  const at::Tensor w = leaf(sample({5, 3}));
  {
    const ImplicitReplication guard;
    (w * spread(sample({5, 3}, 1), mesh, {S0})).sum().backward();
  }
  CHECK_FALSE(is_dtensor(w.grad()));
  distribute_in_place(w, mesh, {S0});
  (w * spread(sample({5, 3}, 1), mesh, {R})).sum().backward();
  CHECK(placements_of(w.grad()) == Placements{S0});
  CHECK(close(full_tensor(w.grad()), 2 * sample({5, 3}, 1)));
}
