// Compares TorchScript functions that index, whose lists of optional tensors TorchScript builds, with the same calls in
// C++.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/TensorIndexing.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/jit.h>
#include <torch/nn.h>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/distribute_module.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/ops/rules/pieces.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using at::indexing::Slice;

struct Operands {
  at::Tensor x;     // (7, 3), with the layout under test
  at::Tensor v;     // (4, 3), with the layout under test
  at::Tensor rows;  // (4), long
  at::Tensor cols;  // (4), long
};

struct IndexRow {
  std::vector<std::string> lines;  // TorchScript code with x, v, rows and cols
  std::function<at::Tensor(const Operands&)> call;
};

using Indices = c10::List<std::optional<at::Tensor>>;

Indices list_of(std::vector<std::optional<at::Tensor>> each) { return Indices(each); }

at::Tensor written(const at::Tensor& x, std::vector<at::indexing::TensorIndex> indices, const auto& value) {
  at::Tensor y = x * 1;
  y.index_put_(indices, value);
  return y;
}

std::vector<IndexRow> table() {
  return {
      {{"return x[rows]"}, [](const Operands& o) { return o.x.index({o.rows}); }},
      {{"return x[:, cols]"},
       [](const Operands& o) {
         return o.x.index({Slice(), o.cols});
       }},
      {{"return x[rows, cols]"},
       [](const Operands& o) {
         return o.x.index({o.rows, o.cols});
       }},
      {{"return x[x > 0]"}, [](const Operands& o) { return o.x.index({o.x > 0}); }},
      {{"y = x * 1", "y[rows] = v", "return y"}, [](const Operands& o) { return written(o.x, {o.rows}, o.v); }},
      {{"y = x * 1", "y[:, cols] = 2.5", "return y"},
       [](const Operands& o) {
         return written(o.x, {Slice(), o.cols}, 2.5);
       }},
      {{"y = x * 1", "y[x > 0] = 3.0", "return y"}, [](const Operands& o) { return written(o.x, {o.x > 0}, 3.0); }},
      {{"return torch.index_put(x, [rows], v, True)"},
       [](const Operands& o) { return at::index_put(o.x, list_of({o.rows}), o.v, true); }},
      {{"return torch._unsafe_index(x, [None, cols])"},
       [](const Operands& o) {
         return at::_unsafe_index(o.x, list_of({std::nullopt, o.cols}));
       }},
      {{"return torch._unsafe_index_put(x, [rows], v, True)"},
       [](const Operands& o) { return at::_unsafe_index_put(o.x, list_of({o.rows}), o.v, true); }},
      {{"i: List[Optional[Tensor]] = [rows]", "return torch._unsafe_masked_index(x, (rows > 0).unsqueeze(1), i, 1.5)"},
       [](const Operands& o) {
         return at::_unsafe_masked_index(o.x, o.rows.gt(0).unsqueeze(1), list_of({o.rows}), 1.5);
       }},
      {{"i: List[Optional[Tensor]] = [rows]",
        "return torch._unsafe_masked_index_put_accumulate(x, (rows > 0).unsqueeze(1), i, v)"},
       [](const Operands& o) {
         return at::_unsafe_masked_index_put_accumulate(o.x, o.rows.gt(0).unsqueeze(1), list_of({o.rows}), o.v);
       }},
  };
}

Operands make_operands() {
  torch::manual_seed(11);
  return {.x = torch::randn({7, 3}, torch::kDouble),
          .v = torch::randn({4, 3}, torch::kDouble),
          .rows = torch::tensor({5, 0, 6, 2}, torch::kLong),
          .cols = torch::tensor({2, 0, 1, 0}, torch::kLong)};
}

struct Called {
  at::Tensor result;
  std::string collectives;
  at::Tensor x_grad, v_grad;
};

// Calls it on new leaves, so that each call has gradients of its own.
Called called(const Operands& given, const std::function<at::Tensor(const Operands&)>& call) {
  Operands o = given;
  o.x = given.x.detach().clone().set_requires_grad(true);
  o.v = given.v.detach().clone().set_requires_grad(true);
  Called out;
  if (is_dtensor(o.x)) {
    const CommCounter counter(mesh_of(o.x));
    out.result = call(o);
    for (const CollectiveRecord& record : counter.records()) out.collectives += fmt::format("{} ", record.kind);
  } else {
    out.result = call(o);
  }
  out.result.square().sum().backward();
  out.x_grad = o.x.grad();
  out.v_grad = o.v.grad();
  return out;
}

bool same_whole(const at::Tensor& mine, const at::Tensor& plain) {
  if (!plain.defined()) return !mine.defined();
  return mine.defined() && same_values(is_dtensor(mine) ? full_tensor(mine.detach()) : mine, plain.detach());
}

// Checks a row under every mode: a plain index counts as one only under ImplicitReplication.
void check_row(const IndexRow& row, const Operands& plain, const Operands& mine) {
  const auto unit =
      torch::jit::compile(fmt::format("def f(x, v, rows, cols):\n    {}\n", fmt::join(row.lines, "\n    ")));
  const auto script = [&](const Operands& o) { return unit->run_method("f", o.x, o.v, o.rows, o.cols).toTensor(); };
  const Called want = called(plain, row.call);
  const Called eager = called(mine, row.call);
  for (int call = 1; call <= 3; ++call) {  // the first is profiled, those after it run specialized code
    CAPTURE(call);
    const Called got = called(mine, script);
    CHECK(is_dtensor(got.result));
    CHECK(placements_of(got.result) == placements_of(eager.result));
    CHECK(got.collectives == eager.collectives);
    CHECK(same_whole(got.result, want.result));
    CHECK(same_whole(got.x_grad, want.x_grad));
    CHECK(same_whole(got.v_grad, want.v_grad));
  }
}

at::Tensor placed(const at::Tensor& t, const DeviceMesh& mesh, const Placement& placement) {
  return distribute_tensor(t, mesh, {placement}, kNoSource);
}

}  // namespace

TEST_CASE(
    "indexing in TorchScript equals plain tensors, and communicates as from C++, on 1 to 4 ranks, by indices of any "
    "kind") {
  const Operands plain = make_operands();
  for (const int64_t size : {1, 2, 3, 4}) {
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {size}, {"tp"}, world);
      const ImplicitReplication implicit;
      for (const Placement& layout : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
        Operands mine = plain;
        mine.x = placed(plain.x, mesh, layout);
        mine.v = placed(plain.v, mesh, layout);
        Operands whole = mine, cut = mine;
        for (at::Tensor Operands::*index : {&Operands::rows, &Operands::cols}) {
          whole.*index = placed(plain.*index, mesh, Replicate());
          cut.*index = placed(plain.*index, mesh, Shard(0));
        }
        for (const IndexRow& row : table()) {
          for (const auto& [kind, operands] :
               {std::pair("plain", mine), std::pair("whole", whole), std::pair("cut", cut)}) {
            const std::string indices = kind, on = to_string(layout);
            CAPTURE(size);
            CAPTURE(row.lines);
            CAPTURE(on);
            CAPTURE(indices);
            check_row(row, plain, operands);
          }
        }
      }
    });
  }
}

TEST_CASE("an index among the columns keeps rows that are cut in their pieces") {
  const Operands plain = make_operands();
  run_in_process(3, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3}, {"tp"}, world);
    const auto unit = torch::jit::compile("def f(x, cols):\n    return x[:, cols]\n");
    const at::Tensor x = placed(plain.x, mesh, Shard(0));
    const Strict strict;
    const ImplicitReplication implicit;
    CHECK(placements_of(unit->run_method("f", x, plain.cols).toTensor()) == Placements{Shard(0)});
    CHECK(placements_of(unit->run_method("f", x, placed(plain.cols, mesh, Replicate())).toTensor()) ==
          Placements{Shard(0)});
  });
}

TEST_CASE("a plain index in a list of TorchScript's is refused where none counts as replicated, as from C++") {
  const Operands plain = make_operands();
  const DeviceMesh mesh = fake_mesh(0, {2}, {"tp"});
  const at::Tensor x = from_local(plain.x, mesh, {Replicate()});
  const auto unit = torch::jit::compile("def f(x, rows):\n    return x[rows]\n");
  CHECK_THROWS_WITH_AS(unit->run_method("f", x, plain.rows), doctest::Contains("a plain tensor [4] among DTensors"),
                       std::exception);
}

TEST_CASE("tensors without values are indexed by TorchScript: the pieces are those of the tensor that is made whole") {
  const Operands plain = make_operands();
  const at::Tensor values = plain.v.to(torch::kFloat);
  const auto unit = torch::jit::compile("def f(x, v, rows):\n    x[rows] = v\n");
  const auto make = [&](const DeviceMesh& mesh) {
    const ShardedInit init(mesh);
    auto module = std::make_shared<torch::nn::Linear>(3, 7);
    const torch::NoGradGuard no_grad;
    unit->run_method("f", (*module)->weight.fill_(1), values, plain.rows);
    return module;
  };
  const at::Tensor want = torch::ones({7, 3}).index_put_({plain.rows}, values);
  for (int64_t rank = 0; rank < 3; ++rank) {
    const DeviceMesh mesh = fake_mesh(rank, {3});
    const auto module = make(mesh);
    distribute_module(**module, mesh, [](const std::string&, torch::nn::Module& m, const DeviceMesh& on) {
      for (const at::Tensor& t : m.parameters(false))
        distribute_in_place(t, on, {t.dim() == 2 ? Shard(1) : Replicate()});
    });
    CHECK(same(to_local((*module)->weight.detach()), piece_of(want, mesh, {Shard(1)})));
  }
}
