#include "tessera/layers/sharded_linear.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/forward_level.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Tensors = std::vector<at::Tensor>;

// The options of a row of the table below.
struct Case {
  std::string name;
  std::vector<int64_t> input;  // sizes of the whole
  bool sequence_parallel = false;
  bool frozen = false;
  bool biased = true;
  bool in_main_grad = false;
};

// One weight sharded by rows: each rank has its rows of W and b, and its piece of the input where that is a sequence.
struct Setup {
  Setup(const Case& c, const DeviceMesh& mesh)
      : x(leaf(sample(c.input, 1))),
        w(leaf(sample({3 * mesh.size(), c.input.back()}, 2))),
        b(leaf(sample({3 * mesh.size()}, 3))),
        my_w(leaf(piece_of(w.detach(), mesh, {Shard(0)}))),
        my_b(leaf(piece_of(b.detach(), mesh, {Shard(0)}))),
        my_x(leaf(c.sequence_parallel ? piece_of(x.detach(), mesh, {Shard(0)}) : x.detach())) {}
  at::Tensor x, w, b, my_w, my_b, my_x;
};

at::Tensor mine(const at::Tensor& t, const DeviceMesh& mesh, int64_t dim) { return piece_of(t, mesh, {Shard(dim)}); }

void check_case(const Case& c, const DeviceMesh& mesh) {
  CAPTURE(c.name);
  const Setup s(c, mesh);
  const at::Tensor main_grad = at::ones_like(s.my_w).detach();
  ShardedLinearOptions options{.reduce_input_gradient = true,
                               .sequence_parallel = c.sequence_parallel,
                               .sequence_size = c.sequence_parallel ? c.input[0] : -1,
                               .frozen_weight = c.frozen};
  if (c.in_main_grad) options.main_grad = main_grad;
  const int64_t many = mesh.size() > 1 && s.x.numel() > 0 ? 1 : 0;  // empty tensors are not sent
  CommCounter counter(mesh);
  const at::Tensor y = sharded_linear(s.my_x, s.my_w, c.biased ? s.my_b : at::Tensor(), mesh, options);
  CHECK(counter.total() == (c.sequence_parallel ? many : 0));
  CHECK(counter.count("all_gather") == counter.total());
  const at::Tensor whole = at::linear(s.x, s.w, c.biased ? std::make_optional(s.b) : std::nullopt);
  CHECK(close(y.detach(), mine(whole.detach(), mesh, whole.dim() - 1)));
  const at::Tensor g = sample(whole.sizes(), 4);
  whole.backward(g);
  counter.reset();
  y.backward(mine(g, mesh, whole.dim() - 1));
  CAPTURE(counter.to_string());
  CHECK(counter.count("all_reduce") == (c.sequence_parallel ? 0 : many));
  CHECK(counter.count("reduce_scatter") == (c.sequence_parallel ? many : 0));
  CHECK(counter.count("all_gather") == (c.sequence_parallel && !c.frozen ? many : 0));
  CHECK(close(s.my_x.grad(), c.sequence_parallel ? mine(s.x.grad(), mesh, 0) : s.x.grad()));
  CHECK(s.my_w.grad().defined() == (!c.frozen && !c.in_main_grad));
  if (s.my_w.grad().defined()) CHECK(close(s.my_w.grad(), mine(s.w.grad(), mesh, 0)));
  CHECK(close(main_grad, c.in_main_grad ? mine(s.w.grad(), mesh, 0) + 1 : at::ones_like(main_grad)));
  if (c.biased) CHECK(close(s.my_b.grad(), mine(s.b.grad(), mesh, 0)));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("columns of a linear layer: results, gradients and collectives", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  for (const Case& c : std::vector<Case>{
           {"vector", {5}},
           {"matrix", {4, 5}},
           {"batches", {2, 3, 5}},
           {"no rows", {0, 5}},
           {"without bias", {4, 5}, false, false, false},
           {"linear_with_frozen_weight: the input's gradient is reduced all the same", {4, 5}, false, true},
           {"main_grad", {4, 5}, false, false, true, true},
           {"sequence", {2 * n, 5}, true},
           {"sequence of batches", {2 * n, 3, 5}, true},
           {"uneven sequence", {2 * n + 1, 3, 5}, true},
           {"sequence shorter than the ranks", {1, 3, 5}, true},
           {"sequence, frozen", {2 * n, 3, 5}, true, true},
           {"sequence, main_grad", {2 * n, 3, 5}, true, false, false, true},
       }) {
    check_case(c, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("gradients of gradients equal one process's", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const bool sequence : {false, true}) {
    const Case c{.name = "", .input = {2 * mesh.size(), 4}, .sequence_parallel = sequence};
    const Setup s(c, mesh);
    const auto penalty = [](const at::Tensor& y, const at::Tensor& x) {
      return torch::autograd::grad({y.pow(3).sum()}, {x}, {}, true, true)[0].pow(2).sum();
    };
    penalty(at::linear(s.x, s.w, s.b), s.x).backward();
    const at::Tensor y =
        sharded_linear(s.my_x, s.my_w, s.my_b, mesh, {.reduce_input_gradient = true, .sequence_parallel = sequence});
    penalty(y, s.my_x).backward();
    CHECK(close(s.my_w.grad(), mine(s.w.grad(), mesh, 0)));
    CHECK(close(s.my_b.grad(), mine(s.b.grad(), mesh, 0)));
    CHECK(close(s.my_x.grad(), sequence ? mine(s.x.grad(), mesh, 0) : s.x.grad()));
  }
}

TESSERA_RANKS_TEST_CASE(
    "columns of the weight, whose products are reduced: results, gradients, theirs, and collectives", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto penalty = [](const at::Tensor& y, const at::Tensor& x) {
    return torch::autograd::grad({y.pow(3).sum()}, {x}, {}, true, true)[0].pow(2).sum();
  };
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{9}, {4, 9}, {2, 3, 9}, {0, 9}}) {
    for (const bool biased : {false, true}) {
      CAPTURE(sizes.size());
      CAPTURE(biased);
      const auto dim = static_cast<int64_t>(sizes.size()) - 1;
      const at::Tensor x = leaf(sample(sizes, 1)), w = leaf(sample({5, 9}, 2)), b = leaf(sample({5}, 3));
      const at::Tensor my_x = leaf(mine(x.detach(), mesh, dim)), my_w = leaf(mine(w.detach(), mesh, 1)), my_b = leaf(b);
      const at::Tensor want = at::linear(x, w, biased ? std::make_optional(b) : std::nullopt);
      CommCounter counter(mesh);
      const at::Tensor y = sharded_linear(my_x, my_w, biased ? my_b : at::Tensor(), mesh, {.reduce_output = true});
      const bool moves = mesh.size() > 1 && want.numel() > 0;
      CHECK(counter.count("all_reduce") == (moves ? 1 : 0));
      CHECK(counter.total() == (moves ? 1 : 0));
      CHECK(close(y.detach(), want.detach()));
      counter.reset();
      y.backward(sample(want.sizes(), 4), /*retain_graph=*/true);
      CHECK(counter.total() == 0);
      want.backward(sample(want.sizes(), 4), /*retain_graph=*/true);
      const auto check = [&] {
        CHECK(close(my_x.grad(), mine(x.grad(), mesh, dim)));
        CHECK(close(my_w.grad(), mine(w.grad(), mesh, 1)));
        if (biased) CHECK(close(my_b.grad(), b.grad()));
      };
      check();
      penalty(want, x).backward();
      penalty(y, my_x).backward();
      check();
    }
  }
  CHECK_THROWS_WITH_AS(
      sharded_linear(sample({4, 9}), sample({5, 9}), {}, mesh, {.reduce_input_gradient = true, .reduce_output = true}),
      doctest::Contains("reduce_output is for columns of the weight"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("complex tensors: gradients, and gradients of gradients, are those of one process", {1, 2}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {world()->size()}, {"tp"}, world());
  const auto numbers = [](at::IntArrayRef sizes, int64_t seed) {
    return at::complex(sample(sizes, seed), sample(sizes, seed + 50));
  };
  const auto alike = [](const at::Tensor& a, const at::Tensor& b) {
    return close(at::view_as_real(a.resolve_conj()), at::view_as_real(b.resolve_conj()));
  };
  const int64_t n = mesh.size();
  const at::Tensor x = leaf(numbers({5, 4}, 1)), w = leaf(numbers({3 * n, 4}, 2)), b = leaf(numbers({3 * n}, 3));
  const at::Tensor my_x = leaf(x.detach()), my_w = leaf(mine(w.detach(), mesh, 0)),
                   my_b = leaf(mine(b.detach(), mesh, 0));
  const at::Tensor factor = numbers({5, 3 * n}, 4);
  const at::Tensor want = at::real(at::linear(x, w, b) * factor).sum();
  const at::Tensor got =
      at::real(sharded_linear(my_x, my_w, my_b, mesh, {.reduce_input_gradient = true}) * mine(factor, mesh, 1)).sum();
  const auto wanted = torch::autograd::grad({want}, {x, w, b}, {}, true, true);
  const auto found = torch::autograd::grad({got}, {my_x, my_w, my_b}, {}, true, true);
  CHECK(alike(found[0].detach(), wanted[0].detach()));
  CHECK(alike(found[1].detach(), mine(wanted[1].detach(), mesh, 0)));
  CHECK(alike(found[2].detach(), mine(wanted[2].detach(), mesh, 0)));
  const at::Tensor twice_wanted = torch::autograd::grad({at::real(wanted[0] * wanted[0]).sum()}, {w})[0];
  const at::Tensor twice_found = torch::autograd::grad({at::real(found[0] * found[0]).sum()}, {my_w})[0];
  CHECK(alike(twice_found, mine(twice_wanted, mesh, 0)));
  got.backward();
  CHECK(alike(my_x.grad(), wanted[0].detach()));
  CHECK(alike(my_w.grad(), mine(wanted[1].detach(), mesh, 0)));
}

TESSERA_RANKS_TEST_CASE("a second backward of one graph gives the gradients again", {2}) {
  const DeviceMesh mesh = line();
  const Setup s({.name = "", .input = {4, 5}}, mesh);
  const at::Tensor y = sharded_linear(s.my_x, s.my_w, s.my_b, mesh, {.reduce_input_gradient = true});
  y.sum().backward({}, /*retain_graph=*/true);
  const at::Tensor once = s.my_x.grad().clone();
  y.sum().backward();
  CHECK(close(s.my_x.grad(), once * 2));
}

TESSERA_RANKS_TEST_CASE("a gradient of the input alone leaves main_grad as it is, and gathers no input for it",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const bool sequence : {false, true}) {
    const at::Tensor x = leaf(sample({4, 5})), w = leaf(sample({6, 5}, 2)),
                     main_grad = at::ones({6, 5}, on(at::kDouble));
    const at::Tensor y = sharded_linear(
        x, w, {}, mesh, {.reduce_input_gradient = true, .sequence_parallel = sequence, .main_grad = main_grad});
    const auto gradient_of = [&](const at::Tensor& t) {
      return torch::autograd::grad({y.sum()}, {t}, {}, /*retain_graph=*/true, false, /*allow_unused=*/true)[0];
    };
    CommCounter counter(mesh);
    const at::Tensor gradient = gradient_of(x);
    CHECK(counter.count("all_gather") == 0);
    CHECK(close(gradient, w.detach().sum(0).expand({4, 5}) * mesh.size()));
    CHECK(same(main_grad, at::ones({6, 5}, on(at::kDouble))));
    CHECK_FALSE(gradient_of(w).defined());  // its gradient goes to main_grad
    CHECK_FALSE(same(main_grad, at::ones({6, 5}, on(at::kDouble))));
  }
}

TESSERA_RANKS_TEST_CASE("a weight may be written before backward where the input needs no gradient", {1, 2}) {
  const DeviceMesh mesh = line();
  const Setup s({.name = "", .input = {4, 5}}, mesh);
  const at::Tensor y = sharded_linear(s.x.detach(), s.my_w, {}, mesh, {});
  {
    const c10::NoGradGuard none;
    s.my_w.mul_(2);
  }
  y.sum().backward();
  CHECK(close(s.my_w.grad(), s.x.detach().sum(0).expand_as(s.my_w)));
}

TESSERA_RANKS_TEST_CASE("a frozen weight gets no gradient from one of the gradient either", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = leaf(sample({4, 5})), w = leaf(sample({6, 5}, 2)), g = leaf(sample({4, 6}, 3));
  const at::Tensor y = sharded_linear(x, w, {}, mesh, {.reduce_input_gradient = true, .frozen_weight = true});
  torch::autograd::grad({y}, {x}, {g}, true, /*create_graph=*/true)[0].pow(2).sum().backward();
  // The input's gradient is the sum of the ranks' products, which are the same here.
  const at::Tensor own = leaf(g.detach());
  torch::autograd::grad({at::linear(x, w.detach())}, {x}, {own}, true, true)[0].pow(2).sum().backward();
  CHECK(close(g.grad(), own.grad() * mesh.size()));
  CHECK_FALSE(w.grad().defined());
}

TESSERA_RANKS_TEST_CASE("bfloat16 products of small whole numbers are exact, and main_grad of float32 takes their sum",
                        {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = (whole_numbers({6, 8}, at::kFloat, 1) - 2).to(at::kBFloat16),
                   w = whole_numbers({4, 8}, at::kBFloat16, 2);
  const at::Tensor weight = leaf(w), main_grad = at::zeros({4, 8}, on(at::kFloat));
  const at::Tensor y = sharded_linear(x, weight, {}, mesh, {.main_grad = main_grad});
  CHECK(same(y.detach().to(at::kFloat), at::linear(x.to(at::kFloat), w.to(at::kFloat))));
  y.sum().backward();
  CHECK(same(main_grad, x.to(at::kFloat).sum(0).expand({4, 8}).contiguous()));
}

TESSERA_RANKS_TEST_CASE("under autocast it multiplies as at::linear does, and backward runs without", {1, 2}) {
  const DeviceMesh mesh = line();
  const auto run = [&](bool sharded) {
    const at::Tensor x = leaf(sample({4, 6}, 1, at::kFloat)), w = leaf(sample({8, 6}, 2, at::kFloat)),
                     b = leaf(sample({8}, 3, at::kFloat));
    at::autocast::set_autocast_dtype(device().type(), at::kBFloat16);
    at::autocast::set_autocast_enabled(device().type(), true);
    const at::Tensor y = sharded ? sharded_linear(x, w, b, mesh) : at::linear(x, w, b);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device().type(), false);
    y.sum().backward();
    return Tensors{y.detach(), x.grad(), w.grad(), b.grad()};
  };
  const Tensors got = run(true), want = run(false);
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(close(got[i].to(at::kFloat), want[i].to(at::kFloat), 1e-2));
  CHECK(same(got[0], want[0]));
}

TESSERA_RANKS_TEST_CASE("what does not fit is refused before anything moves", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = at::ones({4, 5}, on(at::kFloat)), w = at::ones({3, 5}, on(at::kFloat));
  const auto refused = [&](const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                           const std::string& text, const ShardedLinearOptions& options = {}) {
    CHECK_THROWS_WITH_AS(sharded_linear(input, weight, bias, mesh, options), doctest::Contains(text.c_str()),
                         std::invalid_argument);
  };
  CommCounter counter(mesh);
  refused(x, from_local(w, mesh, {Shard(0)}), {}, "to_local(t)");
  refused({}, w, {}, "undefined");
  const at::Tensor nowhere = at::empty({3, 5}, at::kMeta);
  refused(x, nowhere, {}, "the weight is on meta");
  refused(x, w, {}, "the main_grad is on meta", {.main_grad = nowhere});
  CHECK(counter.total() == 0);
}

TESSERA_RANKS_TEST_CASE("forward-mode derivatives of columns and rows of a linear layer, and gradients beside them",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  const at::Tensor x = sample({5, 3, 2 * n}, 1), w = sample({3 * n, 2 * n}, 2), b = sample({3 * n}, 3);
  const at::Tensor dx = sample(x.sizes(), 4), dw = sample(w.sizes(), 5), db = sample(b.sizes(), 6);
  const at::Tensor want = at::linear(x, w, b), change = at::linear(dx, w) + at::linear(x, dw) + db;
  const ForwardLevel level;
  const auto check = [&](const at::Tensor& mine_x, const at::Tensor& y, const at::Tensor& y_want,
                         const at::Tensor& dy_want, const at::Tensor& gradient) {
    CHECK(close(y.detach(), y_want));
    CHECK(close(tangent_of(y).detach(), dy_want));
    CHECK(close(torch::autograd::grad({y}, {mine_x}, {at::ones_like(y)})[0].detach(), gradient));
  };
  for (const bool sequence : {false, true}) {
    CAPTURE(sequence);
    const at::Tensor mine_x = leaf(sequence ? mine(x, mesh, 0) : x);
    const at::Tensor gradient = at::matmul(at::ones_like(want), w);
    const at::Tensor y = sharded_linear(
        dual(mine_x, sequence ? mine(dx, mesh, 0) : dx), dual(mine(w, mesh, 0), mine(dw, mesh, 0)),
        dual(mine(b, mesh, 0), mine(db, mesh, 0)), mesh,
        {.reduce_input_gradient = !sequence, .sequence_parallel = sequence, .sequence_size = sequence ? 5 : -1});
    check(mine_x, y, mine(want, mesh, 2), mine(change, mesh, 2), sequence ? mine(gradient, mesh, 0) : gradient);
  }
  const at::Tensor mine_x = leaf(mine(x, mesh, 2));
  const at::Tensor y = sharded_linear(dual(mine_x, mine(dx, mesh, 2)), dual(mine(w, mesh, 1), mine(dw, mesh, 1)),
                                      dual(b, db), mesh, {.reduce_output = true});
  check(mine_x, y, want, change, mine(at::matmul(at::ones_like(want), w), mesh, 2));
  const at::Tensor frozen = dual(mine(w, mesh, 0), mine(dw, mesh, 0));
  CHECK_THROWS_WITH_AS(sharded_linear(x, frozen, {}, mesh, {.frozen_weight = true}),
                       doctest::Contains("leave frozen_weight"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(sharded_linear(x, frozen, {}, mesh, {.main_grad = at::zeros_like(mine(w, mesh, 0))}),
                       doctest::Contains("leave main_grad out"), std::invalid_argument);
}
