// Tests operators that write: in place, into out=, and on lists.

#include <stdexcept>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placements kKinds = {S0, S1, R, P};

}  // namespace

TESSERA_RANKS_TEST_CASE("an in-place operator keeps self's layout, storage and identity", {1, 2, 3, 4}) {
  const at::Tensor a = sample({5, 3});
  const at::Tensor b = sample({5, 3}, 1);
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& mine : all_layouts(mesh.ndim(), kKinds)) {
      for (const Placements& other : all_layouts(mesh.ndim(), kKinds)) {
        CAPTURE(to_string(mine));
        CAPTURE(to_string(other));
        const at::Tensor self = spread(a, mesh, mine);
        const at::Tensor local = to_local(self);
        at::Tensor self_handle = self;
        const at::Tensor result = self_handle.add_(spread(b, mesh, other), 2);
        CHECK(result.is_same(self));
        CHECK(placements_of(self) == mine);
        CHECK(close(full_tensor(self), a + 2 * b));
        CHECK(to_local(self).is_alias_of(local));
      }
      const at::Tensor self = spread(a, mesh, mine);
      self.mul_(2).add_(0.5).sub_(spread(b, mesh, mine)).relu_();
      CHECK(placements_of(self) == mine);
      CHECK(close(full_tensor(self), (a * 2 + 0.5 - b).relu()));
      self.fill_(8);
      CHECK(close(full_tensor(self), at::full({5, 3}, 8.0, on(at::kDouble))));
      self.zero_();
      CHECK(close(full_tensor(self), at::zeros({5, 3}, on(at::kDouble))));
      self.copy_(spread(b, mesh, Placements(mine.size(), R)));
      CHECK(close(full_tensor(self), b));
      self.add_(spread(sample({3}, 4), mesh, Placements(mine.size(), S0)));
      CHECK(close(full_tensor(self), b + sample({3}, 4)));
      CHECK(placements_of(self) == mine);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a replicated value is added to a pending one without communication", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor pending = spread(sample({5, 3}), mesh, {P});
  const CommCounter counter(mesh);
  pending.add_(spread(sample({5, 3}, 1), mesh, {R}));
  CHECK(counter.total() == 0);
  CHECK(placements_of(pending) == Placements{P});
  CHECK(close(full_tensor(pending), sample({5, 3}) + sample({5, 3}, 1)));
}

TESSERA_RANKS_TEST_CASE("a shape that changes in place gets the layout that the view has", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 1, 3});
  const at::Tensor t = distribute_tensor(whole, mesh, {Shard(0)}, kNoSource);
  const at::Tensor handle = t;
  t.squeeze_(1);
  CHECK(handle.sizes() == at::IntArrayRef({5, 3}));
  CHECK(placements_of(handle) == Placements{Shard(0)});
  t.t_();
  CHECK(placements_of(handle) == Placements{Shard(1)});
  t.mul_(2);
  t.unsqueeze_(0);
  t.transpose_(1, 2);
  CHECK(at::equal(full_tensor(handle), (whole * 2).squeeze(1).unsqueeze(0)));
  at::Tensor leaf = distribute_tensor(whole, mesh, {Shard(0)}, kNoSource);
  leaf.requires_grad_(true);
  const at::Tensor squared = leaf * leaf;
  squared.squeeze_(1);
  squared.sum().backward();
  CHECK(at::allclose(full_tensor(leaf.grad()), whole * 2));
}

TESSERA_RANKS_TEST_CASE("out= keeps the layout of out", {1, 2, 4}) {
  const at::Tensor a = sample({5, 3});
  const at::Tensor b = sample({5, 3}, 1);
  const DeviceMesh mesh = line();
  for (const Placement& of_a : kKinds) {
    for (const Placement& of_out : kKinds) {
      CAPTURE(to_string(of_a));
      CAPTURE(to_string(of_out));
      at::Tensor out = spread(at::zeros({5, 3}, on(at::kDouble)), mesh, {of_out});
      const at::Tensor local = to_local(out);
      CHECK(at::add_out(out, spread(a, mesh, {of_a}), spread(b, mesh, {R})).is_same(out));
      CHECK(placements_of(out) == Placements{of_out});
      CHECK(close(full_tensor(out), a + b));
      CHECK(to_local(out).is_alias_of(local));
      at::Tensor product = spread(at::zeros({5, 5}, on(at::kDouble)), mesh, {of_out});
      at::mm_out(product, spread(a, mesh, {of_a}), spread(b.t().contiguous(), mesh, {S1}));
      CHECK(placements_of(product) == Placements{of_out});
      CHECK(close(full_tensor(product), a.mm(b.t())));
    }
  }
}

TESSERA_RANKS_TEST_CASE("operators on lists, aligned and not", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  const auto list = [&](int64_t seed, const Placements& layouts) {
    std::vector<at::Tensor> out;
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const auto n = static_cast<int64_t>(i);
      out.push_back(spread(sample({n + 3, 4}, seed + n), mesh, {layouts[i]}));
    }
    return out;
  };
  const auto check = [&](const std::vector<at::Tensor>& got, const auto& want, const Placements& layouts) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto n = static_cast<int64_t>(i);
      CHECK(close(full_tensor(got[i]), want(sample({n + 3, 4}, n), sample({n + 3, 4}, 10 + n))));
      if (!layouts.empty()) CHECK(placements_of(got[i]) == Placements{layouts[i]});
    }
  };
  const Placements mine = {S0, R, S1};
  for (const Placements& other : {mine, Placements{S1, S0, R}, {R, R, R}}) {
    const auto sum = [](const at::Tensor& a, const at::Tensor& b) { return a + 2 * b; };
    std::vector<at::Tensor> self = list(0, mine);
    check(at::_foreach_add(self, list(10, other), 2), sum, {});
    at::_foreach_add_(self, list(10, other), 2);
    check(self, sum, mine);
    self = list(0, mine);
    at::_foreach_mul_(self, list(10, other));
    check(
        self, [](const at::Tensor& a, const at::Tensor& b) { return a * b; }, mine);
    self = list(0, mine);
    at::_foreach_addcmul_(self, list(10, other), list(10, mine), 0.5);
    check(
        self, [](const at::Tensor& a, const at::Tensor& b) { return a + 0.5 * b * b; }, mine);
    self = list(0, mine);
    at::_foreach_lerp_(self, list(10, other), 0.25);
    check(
        self, [](const at::Tensor& a, const at::Tensor& b) { return at::lerp(a, b, 0.25); }, mine);
  }
  const std::vector<at::Tensor> with_number =
      at::_foreach_mul({at::scalar_tensor(2.0, on(at::kDouble)), list(0, mine)[0]}, 3);
  CHECK(close(full_tensor(with_number[0]), at::scalar_tensor(6.0, on(at::kDouble))));
  CHECK(close(full_tensor(with_number[1]), sample({3, 4}) * 3));
  std::vector<at::Tensor> self = list(0, {S0, P, S1});
  at::_foreach_mul_(self, 3);
  at::_foreach_add_(self, 1);
  check(self, [](const at::Tensor& a, const at::Tensor&) { return a * 3 + 1; }, {S0, P, S1});
  self = list(0, mine);
  CommCounter counter(mesh);
  at::_foreach_mul_(self, at::scalar_tensor(3.0, on(at::kDouble)));
  CHECK(counter.total() == 0);
  check(
      self, [](const at::Tensor& a, const at::Tensor&) { return a * 3; }, mine);
  self = list(0, mine);
  check(
      at::_foreach_sqrt(at::_foreach_abs(self)), [](const at::Tensor& a, const at::Tensor&) { return a.abs().sqrt(); },
      mine);
  const auto norms = at::_foreach_norm(list(0, mine));
  for (std::size_t i = 0; i < norms.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    CHECK(close(full_tensor(norms[i]), sample({n + 3, 4}, n).norm()));
  }
  at::_foreach_zero_(self);
  check(
      self, [](const at::Tensor& a, const at::Tensor&) { return at::zeros_like(a); }, mine);
}

TESSERA_RANKS_TEST_CASE("a list operator writes a tensor twice that stands in the list twice", {1, 2, 3}) {
  for (const Placement& placement : {R, S0, P}) {
    CAPTURE(to_string(placement));
    const at::Tensor x = spread(sample({3, 4}), line(), {placement});
    at::_foreach_add_({x, x}, 1);
    CHECK(close(full_tensor(x), sample({3, 4}) + 2));
    const at::Tensor a = spread(sample({3, 4}), line(), {placement}),
                     b = spread(sample({3, 4}, 1), line(), {placement});
    const at::Tensor want_a = sample({3, 4}), want_b = sample({3, 4}, 1);
    at::_foreach_mul_({a, b}, {b, a});
    at::_foreach_mul_({want_a, want_b}, {want_b, want_a});
    CHECK(close(full_tensor(a), want_a));
    CHECK(close(full_tensor(b), want_b));
  }
  const at::Tensor rows = spread(sample({3, 4}), line(), {S0}), whole = spread(sample({3, 4}), line(), {R});
  CHECK_THROWS_WITH_AS(at::_foreach_mul_({rows, whole}, {whole, rows}),
                       doctest::Contains("is read again beside tensor 1, as [R]; redistribute both to one layout"),
                       std::invalid_argument);
  CHECK(close(full_tensor(rows), sample({3, 4})));
}

TESSERA_RANKS_TEST_CASE("a list operator that writes is seen by autograd and by copies of views", {1, 2}) {
  for (const Placement& placement : {S0, P}) {
    CAPTURE(to_string(placement));
    const at::Tensor x = spread(sample({4}), line(), {placement}).requires_grad_(true);
    const at::Tensor y = x.exp();
    std::vector<at::Tensor> list = {y.detach()};
    at::_foreach_add_(list, 10.0);
    CHECK_THROWS_WITH(y.sum().backward(), doctest::Contains("modified by an inplace operation"));
  }
  std::vector<at::Tensor> list = {spread(sample({4}), line(), {S0})};
  const at::Tensor first = list[0].select(0, 0);
  at::_foreach_add_(list, 10.0);
  if (world_size() == 1) {
    CHECK(std::abs(first.item<double>() - sample({4})[0].item<double>() - 10) < 1e-12);
  } else {
    CHECK_THROWS_WITH(first.item<double>(), doctest::Contains("has been written since"));
    CHECK_THROWS_WITH(first + 1, doctest::Contains("has been written since"));
  }
}

TESSERA_RANKS_TEST_CASE("a view written in place reaches its base, with its gradient", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const auto run = [](const at::Tensor& x, const at::Tensor& w) {
    at::Tensor y = x * 2;
    y.view({4, 3, 2}).select(2, 1).mul_(w);
    y.t().add_(1);
    return y.pow(2).sum();
  };
  at::Tensor x = sample({4, 6});
  at::Tensor w = sample({4, 3}, 1);
  x.requires_grad_(true);
  w.requires_grad_(true);
  const at::Tensor want = run(x, w);
  want.backward();
  for (const Placement& of_x : {R, S0}) {
    for (const Placement& of_w : {R, S0, P}) {
      CAPTURE(to_string(of_x));
      CAPTURE(to_string(of_w));
      at::Tensor dx = spread(x.detach(), mesh, {of_x});
      at::Tensor dw = spread(w.detach(), mesh, {of_w});
      dx.requires_grad_(true);
      dw.requires_grad_(true);
      const at::Tensor got = run(dx, dw);
      got.backward();
      CHECK(close(full_tensor(got.detach()), want.detach()));
      CHECK(close(full_tensor(dx.grad()), x.grad()));
      CHECK(close(full_tensor(dw.grad()), w.grad()));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a view written in place has the gradient of one process, where that is cut otherwise",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  struct Row {
    std::vector<int64_t> sizes;
    std::function<void(const at::Tensor& y)> write;
  };
  const std::vector<Row> rows = {
      {{6}, [](const at::Tensor& y) { y.select(0, 0).mul_(2); }},
      {{6}, [](const at::Tensor& y) { y.select(0, 5).zero_(); }},
      {{7}, [](const at::Tensor& y) { y.narrow(0, 1, 3).mul_(3); }},
      {{4, 4}, [](const at::Tensor& y) { y.diagonal().mul_(2); }},
      {{6, 4},
       [](const at::Tensor& y) {
         y.view({3, 8}).mul_(2);
       }},
  };
  for (const Row& row : rows) {
    const at::Tensor whole = sample(row.sizes), factors = sample(row.sizes, 1);
    for (int64_t dim = 0; dim < whole.dim(); ++dim) {
      CAPTURE(row.sizes);
      CAPTURE(dim);
      const at::Tensor want = leaf(whole), got = leaf(spread(whole, mesh, {R}));
      const auto loss = [&](const at::Tensor& x, const at::Tensor& weights) {
        const at::Tensor y = x * 1;
        row.write(y);
        return (y * weights).sum();
      };
      loss(want, factors).backward();
      loss(got, spread(factors, mesh, {Shard(dim)})).backward();
      CHECK(close(full_tensor(got.grad()), want.grad()));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a slice written in place changes its base, or is refused", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {R, S0, S1}) {
    CAPTURE(to_string(placement));
    const at::Tensor whole = sample({5, 3});
    const at::Tensor base = spread(whole, mesh, {placement});
    bool refused = false;
    try {
      base.slice(0, 0, 2).zero_();
    } catch (const std::exception& error) {
      refused = true;
      CHECK(std::string(error.what()).find("slice") != std::string::npos);
    }
    at::Tensor want = whole.clone();
    if (!refused) want.slice(0, 0, 2).zero_();
    CHECK(close(full_tensor(base), want));
    if (placement != S0 || mesh.size() == 1) CHECK_FALSE(refused);
  }
}

TESSERA_RANKS_TEST_CASE("a view of what was written since is read without gradient mode", {1, 2}) {
  const DeviceMesh mesh = line();
  at::Tensor leaf = spread(sample({4, 3}), mesh, {Shard(0)});
  leaf.requires_grad_(true);
  const at::Tensor base = spread(sample({4, 3}, 1), mesh, {Shard(0)});
  const at::Tensor view = base.select(1, 0);
  base.copy_(leaf);
  const c10::AutoGradMode no_gradient(false);
  CHECK(close(full_tensor(view.detach()), sample({4, 3}).select(1, 0)));
}

TESSERA_RANKS_TEST_CASE("what a list operator refuses of the dtypes is thrown on every rank, and the job goes on",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  std::vector<at::Tensor> integers = {spread(whole_numbers({5, 3}, at::kLong), mesh, {S0})};
  const std::vector<at::Tensor> elsewhere = {spread(sample({5, 3}), mesh, {S1})};
  const auto cannot = doctest::Contains("can't be cast to the desired output type Long");
  CHECK_THROWS_WITH(at::_foreach_add_(integers, 0.5), cannot);
  CHECK_THROWS_WITH(at::_foreach_sqrt_(integers), cannot);
  CHECK_THROWS_WITH(at::_foreach_add_(integers, elsewhere), cannot);
  CHECK(same(full_tensor(integers[0]), whole_numbers({5, 3}, at::kLong)));
}

TESSERA_RANKS_TEST_CASE("results of a list operator on an expanded tensor are dense, as LibTorch's are", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({8}), rows = sample({4, 8}, 1);
  for (const Placement& placement : {R, S0}) {
    CAPTURE(to_string(placement));
    const std::vector<at::Tensor> wide = {spread(x, mesh, {placement}).expand({4, 8})};
    for (const at::ScalarType dtype : {at::kDouble, at::kComplexDouble}) {
      const std::vector<at::Tensor> other = {spread(rows, mesh, {S0}).to(dtype)};
      const at::Tensor product = at::_foreach_mul(wide, 2)[0], sum = at::_foreach_add(wide, other)[0];
      CHECK(product.is_contiguous());
      CHECK(sum.is_contiguous());
      CHECK(close(full_tensor(product.add_(1)), (x.expand({4, 8}) * 2 + 1)));
      CHECK(close(full_tensor(sum.add_(1).view({32})), (x + rows + 1).to(dtype).view({32})));
    }
  }
}

TESSERA_RANKS_TEST_CASE("out= of an operator that decomposes casts as LibTorch does, and has no derivative", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor a = spread(sample({5, 3}), mesh, {S0}), b = spread(sample({5, 3}, 1), mesh, {R});
  at::Tensor integers = spread(whole_numbers({5, 3}, at::kLong), mesh, {S0});
  CHECK_THROWS_WITH_AS(at::divide_out(integers, a, b),
                       doctest::Contains("result type Double can't be cast to the desired output type Long"),
                       std::invalid_argument);
  CHECK(same(full_tensor(integers), whole_numbers({5, 3}, at::kLong)));
  at::Tensor floats = spread(at::zeros({5, 3}, on(at::kFloat)), mesh, {S1});
  at::divide_out(floats, a, b);
  CHECK(close(full_tensor(floats), (sample({5, 3}) / sample({5, 3}, 1)).to(at::kFloat)));
  at::Tensor joined = spread(at::zeros({10, 3}, on(at::kDouble)), mesh, {R});
  CHECK_THROWS_WITH_AS(at::concat_out(joined, {a, leaf(sample({5, 3}), mesh, {S0})}),
                       doctest::Contains("aten::concat: out= has no derivative"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a plain number in which a hook adds up numbers stays plain", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {R, S0, P}) {
    CAPTURE(to_string(placement));
    const at::Tensor w = leaf(sample({5, 3}), mesh, {placement});
    at::Tensor total = at::zeros({}, on(at::kDouble));
    w.register_hook([&](const at::Tensor& gradient) { total.add_(gradient.square().sum()).mul_(2); });
    for (int pass = 0; pass < 2; ++pass) (w * w).sum().backward();
    CHECK_FALSE(is_dtensor(total));
    const at::Tensor once = sample({5, 3}).mul(2).square().sum();
    CHECK(close(total, (once * 2 + once) * 2));
  }
}
