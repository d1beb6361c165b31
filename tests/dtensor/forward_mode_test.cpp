// Forward-mode derivatives of DTensors: values and tangents beside plain tensors, each operand in turn without a
// tangent.

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/dtensor/forward_level.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Tensors = std::vector<at::Tensor>;

struct Case {
  std::string name;
  Tensors inputs;
  std::function<at::Tensor(const Tensors&)> op;
  bool twice = true;  // LibTorch has the tangent of the gradient of plain tensors, one without a tangent among them
};

at::Tensor whole(const at::Tensor& t) {
  const at::Tensor outside = t.detach();
  return is_dtensor(outside) ? full_tensor(outside) : outside;
}

// A value and its tangent, both whole and plain; and under `with_grad` the first input's gradient and the tangent of
// that.
Tensors derivatives(const Case& each, const Tensors& inputs, const Tensors& tangents, bool with_grad) {
  const ForwardLevel level;
  Tensors duals;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor leaf = inputs[i].detach();
    if (with_grad) leaf.requires_grad_(true);
    duals.push_back(tangents[i].defined() ? dual(leaf, tangents[i]) : leaf);
  }
  const at::Tensor y = each.op(duals);
  const auto [primal, tangent] = at::_unpack_dual(y, 0);
  REQUIRE(tangent.defined());
  CHECK(is_dtensor(tangent) == is_dtensor(inputs[0]));
  Tensors out = {whole(primal), whole(tangent)};
  if (!with_grad) return out;
  const Tensors grads =
      torch::autograd::grad({y.pow(3).sum()}, duals, {}, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (const at::Tensor& grad : grads) {
    const auto [value, change] = at::_unpack_dual(grad, 0);
    out.push_back(whole(value));
    out.push_back(change.defined() ? whole(change) : at::zeros_like(out.back()));
  }
  return out;
}

std::vector<std::vector<Placements>> layouts_of(const Case& each, const DeviceMesh& mesh) {
  std::vector<std::vector<Placements>> out = {{}};
  for (const at::Tensor& input : each.inputs) {
    const bool whole_only = input.dim() == 0 || input.scalar_type() == at::kBool;
    const std::vector<Placements> kinds =
        mesh.ndim() == 1 ? std::vector<Placements>{{R}, {S0}, {input.dim() > 1 ? S1 : S0}, {whole_only ? R : P}}
                         : std::vector<Placements>{{S0, R}, {whole_only ? R : P, S0}, {S0, input.dim() > 1 ? S1 : S0}};
    std::vector<std::vector<Placements>> longer;
    for (const auto& before : out) {
      for (const Placements& kind : kinds) {
        if (input.dim() == 0 && kind != Placements(kind.size(), R)) continue;
        longer.push_back(before);
        longer.back().push_back(kind);
      }
    }
    out = std::move(longer);
  }
  return out;
}

// Returns a tangent for each input but `without` and integers.
Tensors tangents_of(const Case& each, std::size_t without) {
  Tensors tangents;
  for (std::size_t i = 0; i < each.inputs.size(); ++i) {
    const bool has = i != without && each.inputs[i].is_floating_point();
    tangents.push_back(has ? sample(each.inputs[i].sizes(), 20 + static_cast<int64_t>(i)) : at::Tensor());
  }
  return tangents;
}

Tensors spread_all(const Tensors& whole_tensors, const DeviceMesh& mesh, const std::vector<Placements>& layout) {
  Tensors out;
  for (std::size_t i = 0; i < whole_tensors.size(); ++i) {
    out.push_back(whole_tensors[i].defined() ? spread(whole_tensors[i], mesh, layout[i]) : at::Tensor());
  }
  return out;
}

// Checks the case in every `step`-th of the layouts, from the one with number `first` on.
void check_layouts(const Case& each, const DeviceMesh& mesh, const std::vector<std::vector<Placements>>& layouts,
                   std::size_t first, std::size_t step, const Tensors& tangents, bool with_grad) {
  const Tensors want = derivatives(each, each.inputs, tangents, with_grad);
  for (std::size_t k = first; k < layouts.size(); k += step) {
    std::string text;
    for (const Placements& p : layouts[k]) text += to_string(p) + " ";
    CAPTURE(text);
    const Tensors got =
        derivatives(each, spread_all(each.inputs, mesh, layouts[k]), spread_all(tangents, mesh, layouts[k]), with_grad);
    REQUIRE(got.size() == want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(i);
      CHECK(close(got[i], want[i], 1e-10));
    }
  }
}

void check_cases(const std::vector<Case>& cases) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Case& each : cases) {
      CAPTURE(each.name);
      const auto layouts = layouts_of(each, mesh);
      // Tries some of the many layouts, and different ones for each operand without a tangent.
      const std::size_t step = std::max<std::size_t>(1, layouts.size() / 12);
      for (std::size_t without = 0; without <= each.inputs.size(); ++without) {
        CAPTURE(without);
        const Tensors tangents = tangents_of(each, without);
        if (std::ranges::none_of(tangents, [](const at::Tensor& t) { return t.defined(); })) continue;
        check_layouts(each, mesh, layouts, without % step, step, tangents, /*with_grad=*/false);
        if (each.twice) check_layouts(each, mesh, layouts, without % step, step, tangents, /*with_grad=*/true);
      }
    }
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("products keep the tangent of each operand", {1, 2, 3, 4}) {
  check_cases({
      {"mm", {sample({5, 3}), sample({3, 4}, 1)}, [](const Tensors& x) { return at::mm(x[0], x[1]); }},
      {"addmm",
       {sample({5, 4}), sample({5, 3}, 1), sample({3, 4}, 2)},
       [](const Tensors& x) { return at::addmm(x[0], x[1], x[2], 0.5, 2); }},
      {"bmm", {sample({3, 5, 2}), sample({3, 2, 4}, 1)}, [](const Tensors& x) { return at::bmm(x[0], x[1]); }},
      {"linear",
       {sample({5, 3}), sample({4, 3}, 1), sample({4}, 2)},
       [](const Tensors& x) { return at::linear(x[0], x[1], x[2]); }},
      {"linear of three dimensions",
       {sample({2, 5, 3}), sample({4, 3}, 1), sample({4}, 2)},
       [](const Tensors& x) { return at::linear(x[0], x[1], x[2]); }},
      {"linear of four dimensions",
       {sample({2, 2, 3, 5}), sample({4, 5}, 1)},
       [](const Tensors& x) { return at::linear(x[0], x[1]); }},
      {"matmul, of batches",
       {sample({2, 3, 5, 2}), sample({3, 2, 4}, 1)},
       [](const Tensors& x) { return at::matmul(x[0], x[1]); }},
      {"matmul", {sample({2, 5, 3}), sample({3, 4}, 1)}, [](const Tensors& x) { return at::matmul(x[0], x[1]); }},
      {"dot", {sample({7}), sample({7}, 1)}, [](const Tensors& x) { return at::dot(x[0], x[1]); }},
  });
}

TESSERA_RANKS_TEST_CASE("tensors put together keep the tangent of each", {1, 2, 3, 4}) {
  check_cases({
      {"cat",
       {sample({5, 3}), sample({2, 3}, 1)},
       [](const Tensors& x) {
         return at::cat({x[0], x[1]}, 0);
       }},
      {"cat along the other dimension",
       {sample({5, 3}), sample({5, 2}, 1)},
       [](const Tensors& x) {
         return at::cat({x[0], x[1]}, 1);
       }},
      {"stack",
       {sample({5, 3}), sample({5, 3}, 1)},
       [](const Tensors& x) {
         return at::stack({x[0], x[1]}, 1);
       }},
      {"where",
       {sample({5, 3}), sample({5, 3}, 1)},
       [](const Tensors& x) { return at::where(at::gt(x[0], x[1]), x[0], x[1] * 2); }},
      {"lerp",
       {sample({5, 3}), sample({5, 3}, 1), sample({5, 3}, 2)},
       [](const Tensors& x) { return at::lerp(x[0], x[1], x[2]); }},
      {"lerp by a number",
       {sample({5, 3}), sample({5, 3}, 1)},
       [](const Tensors& x) { return at::lerp(x[0], x[1], 0.25); }},
  });
}

TESSERA_RANKS_TEST_CASE("element by element, norms and losses keep the tangent of each operand", {1, 2, 3, 4}) {
  check_cases({
      {"mul, add, sub, div",
       {sample({5, 3}), sample({5, 3}, 1), sample({5, 3}, 2).abs() + 1},
       [](const Tensors& x) { return (x[0] * x[1] + x[1] - x[0]) / x[2]; }},
      {"atan2, hypot",
       {sample({5, 3}).abs() + 1, sample({5, 3}, 1).abs() + 1},
       [](const Tensors& x) { return at::atan2(x[0], x[1]) + at::hypot(x[0], x[1]); }},
      {"layer_norm",
       {sample({5, 3}), sample({3}, 1), sample({3}, 2)},
       [](const Tensors& x) { return at::layer_norm(x[0], {3}, x[1], x[2]); },
       false},
      {"rms_norm",
       {sample({5, 3}), sample({3}, 1)},
       [](const Tensors& x) { return at::rms_norm(x[0], {3}, x[1], 1e-5); },
       false},
      {"group_norm",
       {sample({3, 4, 2}), sample({4}, 1), sample({4}, 2)},
       [](const Tensors& x) { return at::group_norm(x[0], 2, x[1], x[2]); },
       false},
      {"softmax",
       {sample({5, 3}), sample({5, 3}, 1)},
       [](const Tensors& x) { return at::softmax(x[0], 1) * x[1]; },
       false},
      {"attention",  // LibTorch has no tangent of its kernels for plain tensors
       {sample({2, 3, 4, 5}), sample({2, 3, 4, 5}, 1), sample({2, 3, 4, 5}, 2)},
       [](const Tensors& x) {
         if (is_dtensor(x[0])) return at::scaled_dot_product_attention(x[0], x[1], x[2]);
         return std::get<0>(at::_scaled_dot_product_attention_math(x[0], x[1], x[2]));
       },
       false},
      {"mse_loss",
       {sample({5, 3}), sample({5, 3}, 1)},
       [](const Tensors& x) { return at::mse_loss(x[0], x[1]); },
       false},
      {"mse_loss of each",
       {sample({5, 3}), sample({5, 3}, 1)},
       [](const Tensors& x) { return at::mse_loss(x[0], x[1], at::Reduction::None); }},
      {"a sign of numbers", {sample({5, 3}), sample({5, 3}, 1)}, [](const Tensors& x) { return at::sgn(x[0]) * x[1]; }},
  });
}

TESSERA_RANKS_TEST_CASE("the tangent of sgn is a DTensor of zeros", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    const Placements cut(static_cast<std::size_t>(mesh.ndim()), S0);
    const ForwardLevel level;
    const at::Tensor x = dual(spread(sample({5, 3}), mesh, cut), spread(sample({5, 3}, 1), mesh, cut));
    const at::Tensor tangent = std::get<1>(at::_unpack_dual(at::sgn(x), 0));
    REQUIRE(is_dtensor(tangent));
    CHECK(at::equal(full_tensor(tangent), at::zeros({5, 3}, on(at::kDouble))));
  }
}

TESSERA_RANKS_TEST_CASE("a dual written into a view gives the viewed tensor its tangent", {1, 2, 3, 4}) {
  struct Row {
    std::string name;
    std::vector<int64_t> sizes;  // of what is written
    std::function<void(const at::Tensor&, const at::Tensor&)> write;
  };
  const std::vector<Row> rows = {
      {"the whole", {4, 6}, [](const at::Tensor& x, const at::Tensor& v) { x.copy_(v); }},
      {"view",
       {2, 2, 6},
       [](const at::Tensor& x, const at::Tensor& v) {
         x.view({2, 2, 6}).copy_(v);
       }},
      {"select, add_", {6}, [](const at::Tensor& x, const at::Tensor& v) { x.select(0, 0).add_(v); }},
      {"select, mul_", {4}, [](const at::Tensor& x, const at::Tensor& v) { x.select(1, 2).mul_(v); }},
      {"index", {6}, [](const at::Tensor& x, const at::Tensor& v) { x[0] = v; }},
      {"slice", {4, 2}, [](const at::Tensor& x, const at::Tensor& v) { x.slice(1, 1, 5, 2).copy_(v); }},
      {"transposed", {6, 4}, [](const at::Tensor& x, const at::Tensor& v) { x.t().copy_(v); }},
      {"a view of a view", {6, 2}, [](const at::Tensor& x, const at::Tensor& v) { x.narrow(0, 1, 2).t().add_(v); }},
      {"broadcast", {6}, [](const at::Tensor& x, const at::Tensor& v) { x.narrow(0, 0, 2).copy_(v); }},
  };
  const auto run = [](const Row& row, const at::Tensor& x, const at::Tensor& v, bool x_dual, bool with_grad,
                      const auto& spread_tangent) {
    const ForwardLevel level;
    at::Tensor leaf = v.detach();
    if (with_grad) leaf.requires_grad_(true);
    at::Tensor base = x.detach().clone();
    if (x_dual) base = dual(base, spread_tangent(sample({4, 6}, 8)));
    const at::Tensor view = base.slice(1, 0, 6).narrow(1, 0, 3);  // made before the write, read behind it
    row.write(base, dual(leaf, spread_tangent(sample(row.sizes, 9))));
    const auto [primal, tangent] = at::_unpack_dual(base, 0);
    const auto [view_primal, view_tangent] = at::_unpack_dual(view, 0);
    REQUIRE(tangent.defined());
    REQUIRE(view_tangent.defined());
    Tensors out = {whole(primal), whole(tangent), whole(view_primal), whole(view_tangent)};
    if (!with_grad) return out;
    const at::Tensor grad = torch::autograd::grad({base.pow(3).sum()}, {leaf})[0];
    out.push_back(whole(grad));
    out.push_back(whole(std::get<1>(at::_unpack_dual(grad, 0))));
    return out;
  };
  const auto plain = [](const at::Tensor& t) { return t; };
  for (const DeviceMesh& mesh : meshes()) {
    const std::vector<Placements> kinds = mesh.ndim() == 1 ? std::vector<Placements>{{R}, {S0}, {S1}}
                                                           : std::vector<Placements>{{S0, R}, {S0, S1}, {R, S1}};
    for (const Row& row : rows) {
      CAPTURE(row.name);
      for (const Placements& kind : kinds) {
        const std::string layout = to_string(kind);
        CAPTURE(layout);
        Placements same(kind.size(), R);
        if (row.sizes.size() == 2 && row.name != "transposed" && row.name != "a view of a view") same = kind;
        const auto spread_like = [&](const at::Tensor& t) {
          return spread(t, mesh, t.sizes() == at::IntArrayRef({4, 6}) ? kind : same);
        };
        for (const bool x_dual : {false, true}) {
          for (const bool with_grad : {false, true}) {
            CAPTURE(x_dual);
            CAPTURE(with_grad);
            const Tensors got = run(row, spread(sample({4, 6}), mesh, kind), spread_like(sample(row.sizes, 3)), x_dual,
                                    with_grad, spread_like);
            const Tensors want = run(row, sample({4, 6}), sample(row.sizes, 3), x_dual, with_grad, plain);
            REQUIRE(got.size() == want.size());
            for (std::size_t i = 0; i < want.size(); ++i) {
              CAPTURE(i);
              CHECK(close(got[i], want[i], 1e-10));
            }
          }
        }
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("views of a dual that begins inside another tensor keep its tangent", {1, 2, 3, 4}) {
  const ForwardLevel level;
  const at::Tensor x = sample({5, 6}), change = sample({4, 6}, 1);
  for (const Placement& placement : {R, S0, S1}) {
    CAPTURE(to_string(placement));
    const at::Tensor rows = spread(x, line(), {placement}).slice(0, 1);
    const at::Tensor d = dual(rows, redistribute(spread(change, line(), {placement}), placements_of(rows)));
    for (const at::Tensor& view : {d.t(), d.slice(0, 2).t(), d.unsqueeze(0).select(0, 0).t()}) {
      const auto [value, tangent] = at::_unpack_dual(view, 0);
      const int64_t skipped = 4 - view.size(1);
      CHECK(close(whole(value), x.slice(0, 1 + skipped).t()));
      CHECK(close(whole(tangent), change.slice(0, skipped).t()));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a tangent goes where its tensor is redistributed to", {1, 2, 3, 4}) {
  const at::Tensor value = sample({5, 3}), change = sample({5, 3}, 1);
  for (const DeviceMesh& mesh : meshes()) {
    const std::vector<Placements> layouts = all_layouts(mesh.ndim(), {R, S0, S1, P});
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) {
        for (const bool with_grad : {false, true}) {
          CAPTURE(to_string(from));
          CAPTURE(to_string(to));
          CAPTURE(with_grad);
          const ForwardLevel level;
          at::Tensor leaf = spread(value, mesh, from);
          leaf.requires_grad_(with_grad);
          const at::Tensor moved = redistribute(dual(leaf, spread(change, mesh, layouts[0])), to);
          const auto [primal, tangent] = at::_unpack_dual(moved, 0);
          REQUIRE(tangent.defined());
          CHECK(placements_of(moved) == to);
          CHECK(close(whole(primal), value));
          CHECK(close(whole(tangent), change));
          if (with_grad) CHECK(close(whole(torch::autograd::grad({moved.pow(2).sum()}, {leaf})[0]), 2 * value));
        }
      }
    }
    const Placements pending(static_cast<std::size_t>(mesh.ndim()), Partial(ReduceOp::kMax));
    const Placements all(pending.size(), R);
    const ForwardLevel level;
    const at::Tensor t = dual(spread(value, mesh, pending), spread(change, mesh, all));
    CHECK_THROWS_WITH_AS(redistribute(t, all), doctest::Contains("does not go through P(max)"), std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("a write to a redistributed tensor leaves the source's tangent as it was", {1, 2, 3}) {
  const at::Tensor value = sample({5, 3}), change = sample({5, 3}, 1);
  for (const Placement& from : {R, S0, S1}) {
    for (const Placement& of_tangent : {R, S0, S1}) {
      CAPTURE(to_string(Placements{from, of_tangent}));
      const ForwardLevel level;
      const at::Tensor source = dual(spread(value, line(), {from}), spread(change, line(), {of_tangent}));
      const at::Tensor moved = redistribute(source, {from == R ? S0 : R});
      moved.mul_(3);
      const auto [primal, tangent] = at::_unpack_dual(source, 0);
      CHECK(close(whole(primal), value));
      CHECK(close(whole(tangent), change));
      CHECK(close(whole(std::get<1>(at::_unpack_dual(moved, 0))), 3 * change));
    }
  }
}

TESSERA_RANKS_TEST_CASE("the tangent of a loss whose classes are cut", {1, 2, 3, 4}) {
  const at::Tensor target = at::tensor({1, 0, 4, 2, 4}, on(at::kLong));
  check_cases({{"cross_entropy",
                {sample({5, 6})},
                [&](const Tensors& x) {
                  if (!is_dtensor(x[0])) return at::cross_entropy_loss(x[0], target);
                  const Placements all(placements_of(x[0]).size(), R);
                  return at::cross_entropy_loss(x[0], distribute_tensor(target, mesh_of(x[0]), all));
                },
                false}});
}

TESSERA_RANKS_TEST_CASE("tangents cross to plain pieces and back", {1, 2, 3, 4}) {
  const at::Tensor value = sample({5, 3}), change = sample({5, 3}, 1);
  for (const DeviceMesh& mesh : meshes()) {
    const std::vector<Placements> layouts = all_layouts(mesh.ndim(), {R, S0, S1, P});
    for (const Placements& layout : layouts) {
      CAPTURE(to_string(layout));
      for (const Placements& of_tangent : {layout, layouts[0], layouts[1]}) {
        for (const bool with_grad : {false, true}) {
          CAPTURE(to_string(of_tangent));
          CAPTURE(with_grad);
          const ForwardLevel level;
          at::Tensor leaf = spread(value, mesh, layout);
          leaf.requires_grad_(with_grad);
          const at::Tensor piece = to_local(dual(leaf, spread(change, mesh, of_tangent)));
          REQUIRE(std::get<1>(at::_unpack_dual(piece, 0)).defined());
          const at::Tensor back = from_local(piece * 3, mesh, layout, {.shape = std::vector<int64_t>{5, 3}});
          const auto [primal, tangent] = at::_unpack_dual(back, 0);
          REQUIRE(tangent.defined());
          CHECK(close(whole(primal), 3 * value));
          CHECK(close(whole(tangent), 3 * change));
          const at::Tensor all = full_tensor(dual(leaf, spread(change, mesh, of_tangent)));
          CHECK(close(std::get<1>(at::_unpack_dual(all, 0)).detach(), change));
          if (!with_grad) continue;
          const auto [gradient, of_gradient] =
              at::_unpack_dual(torch::autograd::grad({back.pow(2).sum()}, {leaf})[0], 0);
          CHECK(close(whole(gradient), 18 * value));
          REQUIRE(of_gradient.defined());
          CHECK(close(whole(of_gradient), 18 * change));
        }
      }
      for (const int64_t source : {kMeshFirstRank, kNoSource}) {
        const ForwardLevel level;
        const at::Tensor spread_dual = distribute_tensor(dual(value, change), mesh, layout, source);
        const auto [primal, tangent] = at::_unpack_dual(spread_dual, 0);
        REQUIRE(tangent.defined());
        CHECK(close(whole(primal), value));
        CHECK(close(whole(tangent), change));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("a tangent that is refused says what to do", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const ForwardLevel level;
  const at::Tensor x = spread(sample({5, 3}), mesh, {S0});
  CHECK_THROWS_WITH_AS(dual(x, sample({5, 3}, 1)), doctest::Contains("give a DTensor of the same sizes"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(dual(x, spread(sample({5, 2}, 1), mesh, {S0})), doctest::Contains("of the same sizes"),
                       std::invalid_argument);
  const at::Tensor once = dual(x, spread(sample({5, 3}, 1), mesh, {S0}));
  CHECK_THROWS_WITH_AS(dual(once, x), doctest::Contains("has a tangent already"), std::invalid_argument);
  const at::Tensor most = dual(spread(sample({5, 3}), mesh, {Partial(ReduceOp::kMax)}), x);
  CHECK_THROWS_WITH_AS(to_local(most), doctest::Contains("does not go through P(max)"), std::invalid_argument);
  const at::Tensor piece = dual(sample({5, 3}), sample({5, 3}, 1));
  CHECK_THROWS_WITH_AS(from_local(piece, mesh, {Partial(ReduceOp::kMax)}),
                       doctest::Contains("does not go through P(max)"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(at::mul(x, piece), doctest::Contains("a plain tensor [5, 3] among DTensors"),
                       std::invalid_argument);
  if (mesh.size() > 1) {
    const at::Tensor given = mesh.local_rank(0) == 0 ? piece : sample({5, 3});
    CHECK_THROWS_WITH_AS(distribute_tensor(given, mesh, {S0}),
                         doctest::Contains("a tangent on some ranks and none on others"), std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("lists written in place take the tangents of the others", {1, 2}) {
  for (const Placement& layout : {R, S0, S1}) {
    const DeviceMesh mesh = line();
    const ForwardLevel level;
    std::vector<at::Tensor> written = {spread(sample({5, 3}), mesh, {layout}),
                                       spread(sample({5, 3}, 1), mesh, {layout})};
    const at::Tensor change = sample({5, 3}, 2);
    const at::Tensor other = dual(spread(sample({5, 3}, 3), mesh, {layout}), spread(change, mesh, {layout}));
    at::_foreach_add_(written, {other, spread(sample({5, 3}, 4), mesh, {layout})}, 2);
    CHECK(close(whole(std::get<1>(at::_unpack_dual(written[0], 0))), 2 * change));
  }
}
