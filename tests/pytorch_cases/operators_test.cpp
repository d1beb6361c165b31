// Runs PyTorch's own cases 22 to 33, about operators, with the layouts and collectives that they state. More layouts
// and operators are in tests/dtensor/ops_*_test.cpp and tests/everyday.

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"

namespace tessera::testing {
namespace {

Placements placements_of(const Ran& ran) { return tessera::placements_of(ran.result); }

}  // namespace

TEST_CASE("22: addmm: the layouts of the product decide, the bias is added once") {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor a = sample({12, 8}), b = sample({8, 4}, 1);
    struct Row {
      std::vector<int64_t> bias;
      Placement of_bias, of_a, of_b, of_result;
    };
    const std::vector<Row> rows = {{{4}, R, S0, R, S0},      {{12, 4}, S0, S0, R, S0}, {{1, 4}, R, S0, R, S0},
                                   {{12, 1}, S0, S0, R, S0}, {{4}, S0, R, S1, S1},     {{12, 4}, S1, R, S1, S1},
                                   {{1, 4}, S1, R, S1, S1},  {{12, 1}, R, R, S1, S1},  {{4}, P, S1, S0, P},
                                   {{12, 4}, P, S1, S0, P},  {{}, R, S0, R, S0},       {{}, R, R, S1, S1},
                                   {{12, 1}, P, S1, S0, P}};
    for (const Row& row : rows) {
      CAPTURE(row.bias);
      CAPTURE(to_string(row.of_result));
      const Ran ran = beside_plain(mesh, {{sample(row.bias, 2), {row.of_bias}}, {a, {row.of_a}}, {b, {row.of_b}}},
                                   [](const Tensors& x) { return at::addmm(x[0], x[1], x[2]); });
      CHECK(ran.forward == "-");
      CHECK(placements_of(ran) == Placements{row.of_result});
    }
  });
}

TEST_CASE("23: mm of every pair of layouts, of nothing, and of a strided shard, which stays") {
  on_lines([](const DeviceMesh& mesh) {
    const Operator mm = [](const Tensors& x) { return at::mm(x[0], x[1]); };
    for (const Placement& left : {S0, S1, R, P}) {
      for (const Placement& right : {S0, S1, R, P}) {
        beside_plain(mesh, {{sample({12, 8}), {left}}, {sample({8, 16}, 1), {right}}}, mm);
        beside_plain(mesh, {{sample({12, 0}), {left}}, {sample({0, 4}, 1), {right}}}, mm);
      }
    }
  });
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    // _StridedShard(0, 2) gives each rank its chunk of each half.
    const Placement strided = IntervalShard(0, {{{0, 2}, {6, 8}}, {{2, 4}, {8, 10}}, {{4, 6}, {10, 12}}, {}});
    const Ran ran = beside_plain(mesh, {{sample({12, 8}), {strided}}, {sample({8, 16}, 1), {R}}},
                                 [](const Tensors& x) { return at::mm(x[0], x[1]); });
    CHECK(ran.forward == "-");
    CHECK(placements_of(ran) == Placements{strided});
  });
}

TEST_CASE("24: softmax of four times (8, 12, 16) keeps its cut: free along other dimensions, sums along the cut one") {
  on_lines([](const DeviceMesh& mesh) {
    for (int64_t dim = 0; dim < 3; ++dim) {
      for (int64_t cut = 0; cut < 3; ++cut) {
        CAPTURE(dim);
        CAPTURE(cut);
        const Ran ran = beside_plain(mesh, {{sample({32, 48, 64}), {Shard(cut)}}},
                                     [&](const Tensors& x) { return at::softmax(x[0], dim); });
        if (mesh.size() == 1) continue;
        CHECK(ran.forward == (dim == cut ? "all_reduce 2" : "-"));
        CHECK(ran.backward == (dim == cut ? "all_reduce 1" : "-"));
        CHECK(placements_of(ran) == Placements{Shard(cut)});
        beside_plain(mesh, {{sample({32, 48, 64}), {Shard(cut)}}},
                     [&](const Tensors& x) { return at::log_softmax(x[0], dim); });
      }
    }
  });
}

TEST_CASE("25: cross_entropy of (8, 16) and (8, 16, 12): a loss of items in shards takes no collective") {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      for (const bool pixels : {false, true}) {
        const at::Tensor logits = pixels ? sample({8, 16, 12}) : sample({8, 16});
        const at::Tensor target = whole_numbers(pixels ? at::IntArrayRef{8, 12} : at::IntArrayRef{8}, at::kLong) * 3;
        for (int64_t cut = 0; cut < logits.dim(); ++cut) {
          CAPTURE(reduction);
          CAPTURE(pixels);
          CAPTURE(cut);
          const Placement of_target = cut == 0 ? S0 : cut == 2 ? S1 : R;
          const Ran ran = beside_plain(mesh, {{logits, {Shard(cut)}}, {target, {of_target}}}, [&](const Tensors& x) {
            return at::cross_entropy_loss(x[0], x[1], {}, reduction);
          });
          if (cut == 1) continue;
          // The mean divides by the number of targets that count, which is summed over all ranks.
          CHECK(ran.forward == (reduction == at::Reduction::Mean ? "all_reduce 1" : "-"));
          CHECK(placements_of(ran) == Placements{reduction == at::Reduction::None ? of_target : P});
          CHECK(ran.backward == "-");
        }
      }
    }
  });
}

TEST_CASE("26: layer_norm and rms_norm of (20, 5, 10), each dimension cut, each suffix normalized") {
  on_lines([](const DeviceMesh& mesh) {
    for (int64_t cut = 0; cut < 3; ++cut) {
      for (int64_t first = 0; first < 3; ++first) {
        CAPTURE(cut);
        CAPTURE(first);
        const at::Tensor x = sample({20, 5, 10});
        const std::vector<int64_t> suffix = x.sizes().slice(static_cast<std::size_t>(first)).vec();
        const Ran ran = beside_plain(
            mesh, {{x, {Shard(cut)}}, {sample(suffix, 1), {R}}, {sample(suffix, 2), {R}}},
            [&](const Tensors& t) { return at::layer_norm(t[0], suffix, t[1], t[2]); }, 1e-11);
        beside_plain(
            mesh, {{x, {Shard(cut)}}, {sample(suffix, 1), {R}}},
            [&](const Tensors& t) { return at::rms_norm(t[0], suffix, t[1]); }, 1e-11);
        if (mesh.size() == 1) continue;
        if (cut >= first) {
          CHECK(ran.forward.ends_with(" 1"));  // one collective
          continue;
        }
        CHECK(ran.forward == "-");
        CHECK(placements_of(ran) == Placements{Shard(cut)});
        CHECK(ran.backward == "all_reduce 2");  // the weight's and the bias's
      }
    }
  });
}

TEST_CASE("27: reductions of (12, 8, 8), each dimension, kept or not") {
  on_lines([](const DeviceMesh& mesh) {
    const at::Tensor x = sample({12, 8, 8}), flags = x > -0.9;
    for (int64_t dim = 0; dim < 3; ++dim) {
      for (const bool keep : {false, true}) {
        CAPTURE(dim);
        CAPTURE(keep);
        const auto check = [&](const char* name, const at::Tensor& whole, const Operator& f) {
          CAPTURE(name);
          beside_plain(mesh, {{whole, {S0}}}, f);
        };
        check("sum", x, [&](const Tensors& t) { return t[0].sum(dim, keep); });
        check("prod", x, [&](const Tensors& t) { return t[0].prod(dim, keep); });
        check("mean", x, [&](const Tensors& t) { return t[0].mean(dim, keep); });
        check("max", x, [&](const Tensors& t) { return std::get<0>(t[0].max(dim, keep)); });
        check("min", x, [&](const Tensors& t) { return std::get<0>(t[0].min(dim, keep)); });
        check("amax", x, [&](const Tensors& t) { return t[0].amax(dim, keep); });
        check("amin", x, [&](const Tensors& t) { return t[0].amin(dim, keep); });
        check("any", flags, [&](const Tensors& t) { return t[0].logical_not().any(dim, keep); });
        check("all", flags, [&](const Tensors& t) { return t[0].all(dim, keep); });
        check("all of whole numbers", flags.to(at::kLong) * 7, [&](const Tensors& t) { return t[0].all(dim, keep); });
      }
    }
  });
}

TEST_CASE("28: ones on 2 x 2 and a number") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const Placements& placements : {Placements{S0, S0}, {S0, S1}}) {
      const at::Tensor t = spread(at::ones({4, 4}), mesh, placements);
      for (const at::Tensor& result : {t + 2, t - 2, t * 2, t / 2}) CHECK(tessera::placements_of(result) == placements);
      CHECK(same(full_tensor(t + 2), at::full({4, 4}, 3.0F)));
      CHECK(same(full_tensor(t - 2), at::full({4, 4}, -1.0F)));
      CHECK(same(full_tensor(t * 2), at::full({4, 4}, 2.0F)));
      CHECK(same(full_tensor(t / 2), at::full({4, 4}, 0.5F)));
    }
  });
}

TEST_CASE("30: copy_ between layouts, broadcasting; fill_, ones_like and zeros_like of a pending value") {
  on_lines([](const DeviceMesh& mesh) {
    const Placement pending_max = Partial(ReduceOp::kMax);
    const at::Tensor value = sample({6, 1});
    for (const Placement& to : {R, S0, S1, S2, P, pending_max}) {
      for (const Placement& from : {R, S0, P}) {
        CAPTURE(to_string(to));
        CAPTURE(to_string(from));
        const at::Tensor self = spread(sample({3, 2, 6, 4}), mesh, {to});
        self.copy_(spread(value, mesh, {from}));
        CHECK(tessera::placements_of(self) == Placements{to});
        CHECK(close(full_tensor(self), value.expand({3, 2, 6, 4}).contiguous()));
      }
    }
    for (const Placement& pending : {P, pending_max, Partial(ReduceOp::kAvg), Partial(ReduceOp::kProduct)}) {
      CAPTURE(to_string(pending));
      const at::Tensor t = spread(sample({5, 3}), mesh, {pending});
      CHECK(same(full_tensor(at::ones_like(t)), at::ones({5, 3}, at::kDouble)));
      CHECK(same(full_tensor(at::zeros_like(t)), at::zeros({5, 3}, at::kDouble)));
      CHECK(close(full_tensor(t.fill_(8)), at::full({5, 3}, 8.0, at::kDouble)));
    }
  });
}

TEST_CASE("31: stack keeps pending reductions and shifts the sharded dimensions") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto stacked = [&](const Placements& a, const Placements& b, int64_t dim) {
      const Ran ran = beside_plain(mesh, {{sample({4, 6}), a}, {sample({4, 6}, 1), b}}, [&](const Tensors& x) {
        return at::stack({x[0], x[1]}, dim);
      });
      CHECK(ran.forward == "-");
      return placements_of(ran);
    };
    CHECK(stacked({P, P}, {P, P}, 0) == Placements{P, P});
    CHECK(stacked({P, R}, {P, P}, 0) == Placements{P, P});
    CHECK(stacked({S1, R}, {S1, R}, 0) == Placements{S2, R});
    CHECK(stacked({R, S1}, {R, S1}, 1) == Placements{R, S2});
    CHECK(stacked({S0, S1}, {S0, S1}, 2) == Placements{S0, S1});
  });
}

TEST_CASE("32: an embedding by rows waits for its reduction, by columns for nothing") {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    for (int64_t rows = 10; rows <= 16; ++rows) {
      CAPTURE(rows);
      const at::Tensor ids = (at::arange(12) * 7 % rows).view({3, 4});
      for (const int64_t padding : {-1, 2}) {
        const Operator look_up = [&](const Tensors& x) { return at::embedding(x[0], x[1], padding); };
        const Ran by_rows = beside_plain(mesh, {{sample({rows, 5}), {S0}}, {ids, {R}}}, look_up);
        CHECK(by_rows.forward == "-");
        CHECK(by_rows.backward == "-");
        CHECK(placements_of(by_rows)[0].is_partial());
        const CommCounter counter(mesh);
        full_tensor(by_rows.result.detach());
        CHECK(counts(counter) == "all_reduce 1");
        const Ran by_columns = beside_plain(mesh, {{sample({7, rows}), {S1}}, {ids % 7, {R}}}, look_up);
        CHECK(by_columns.forward == "-");
        CHECK(by_columns.backward == "-");
        CHECK(placements_of(by_columns) == Placements{S2});
      }
    }
  });
}

TEST_CASE("33: views that split, join and add dimensions of the leftmost cut one move nothing") {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    struct Row {
      std::vector<int64_t> from, to;
      std::vector<int64_t> free;  // the dimensions that may be sharded without communication
    };
    const std::vector<Row> rows = {
        {{2, 3}, {3, 2}, {}},
        {{4, 3}, {3, 4}, {}},
        {{3, 4, 5}, {12, 5}, {1, 2}},
        {{4, 3, 5}, {12, 5}, {0, 2}},
        {{3, 24}, {1, 3, 2, 4, 1, 3, 1}, {0, 1}},
        {{2, 3, 4, 5, 7}, {3, 8, 7, 5}, {}},
        {{4, 6, 2}, {4, 2, 3, 2}, {0, 1, 2}},
        {{8, 3}, {2, 4, 3}, {0}},
    };
    for (const Row& row : rows) {
      for (std::size_t cut = 0; cut < row.from.size(); ++cut) {
        CAPTURE(row.from);
        CAPTURE(row.to);
        CAPTURE(cut);
        const Ran ran = beside_plain(mesh, {{sample(row.from), {Shard(static_cast<int64_t>(cut))}}},
                                     [&](const Tensors& x) { return x[0].view(row.to) * 2; });
        const bool free = std::find(row.free.begin(), row.free.end(), static_cast<int64_t>(cut)) != row.free.end();
        if (free) CHECK(ran.forward == "-");
        if (free) CHECK(ran.backward == "-");
      }
    }
  });
}

}  // namespace tessera::testing
