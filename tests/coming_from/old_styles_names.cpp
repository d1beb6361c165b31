// Tests the names of document 004, the styles of PyTorch 2.0, with each of their parameters, against one process, and
// counts their collectives.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/pairwise.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallel_styles.h"
#include "tessera/styles/style.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/dtensor/whole_value.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"
#include "tessera/tests/layers/counted.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct HookedLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
};
TESSERA_MODULE(HookedLinear);

// Gives the module the same values on every rank, in float64.
void fill(torch::nn::Module& module) {
  module.to(at::kDouble);
  const c10::AutoGradMode none(false);
  int64_t seed = 5;
  for (const at::Tensor& each : module.parameters()) at::Tensor(each).copy_(sample(each.sizes(), ++seed));
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", HookedLinear(10, 24));
    down = register_module("down", HookedLinear(24, 12));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return down->forward(up->forward(x).relu()); }
  HookedLinear up = nullptr, down = nullptr;
};
TESSERA_MODULE(Mlp);

at::Tensor last_dim(const at::Tensor& x, const MaybeMesh& mesh) { return make_input_shard_1d_last_dim(x, mesh); }
at::Tensor doubled(const at::Tensor& y, const MaybeMesh& mesh) { return make_output_tensor(y, mesh) * 2; }

// Compares the gradients of all parameters with those in one process.
template <class Module>
void check_parameter_gradients(const Module& got, const Module& want) {
  for (std::size_t i = 0; i < want->parameters().size(); ++i) {
    CAPTURE(i);
    CHECK(close(full_tensor(got->parameters()[i].grad()), want->parameters()[i].grad()));
  }
}

// Names the collectives that counted() gives for forward and for backward on several ranks.
struct Expected {
  const char* forward;
  const char* backward;
};

// Compares the plan with one process: where `sequence` is set, `x` and the output are sharded along dimension 0.
template <class PlanOrStyle>
void check_plan(const PlanOrStyle& plan, bool sequence, const Expected& expected, const DeviceMesh& mesh) {
  Mlp model, one;
  auto tp = parallelize_module(model, mesh, plan);
  const at::Tensor x = leaf(sample({sequence ? 2 * mesh.size() : 11, 10}));
  const Placements lies = {sequence ? Shard(0) : Replicate()};
  const at::Tensor mine = leaf(piece_of(x, mesh, lies));
  CommCounter counter(mesh);
  const at::Tensor got = tp(mine), want = one->forward(x);
  CHECK(counted(counter) == (mesh.size() > 1 ? expected.forward : ""));
  REQUIRE_FALSE(is_dtensor(got));
  CHECK(close(got.detach(), piece_of(want.detach(), mesh, lies)));
  const at::Tensor g = sample(want.sizes(), 2);
  want.backward(g);
  counter.reset();
  got.backward(piece_of(g, mesh, lies));
  CHECK(counted(counter) == (mesh.size() > 1 ? expected.backward : ""));
  CHECK(close(mine.grad(), piece_of(x.grad(), mesh, lies)));
  check_parameter_gradients(model, one);
}

// Holds the subcases of functions before and after a linear layer of the style. The input is prepared from this rank's
// rows, which the style alone would not take.
void check_prepared(const Style& style, const DeviceMesh& mesh) {
  HookedLinear layer(10, 24), one(10, 24);
  fill(*layer);
  fill(*one);
  const at::Tensor x = leaf(sample({2 * mesh.size(), 10})), want = one->forward(x), g = sample(want.sizes(), 2);
  SUBCASE("_prepare_input") {
    auto tp = parallelize_module(layer, mesh, Prepared(style, make_input_reshard_replicate));
    const at::Tensor mine = leaf(piece_of(x, mesh, {Shard(0)})), got = tp(mine);
    CHECK(close(whole_value(got), want.detach()));
    want.backward(g);
    got.backward(spread(g, mesh, placements_of(got)));
    CHECK(close(mine.grad(), piece_of(x.grad(), mesh, {Shard(0)})));
    check_parameter_gradients(layer, one);
  }
  SUBCASE("_prepare_output") {
    auto tp = parallelize_module(layer, mesh, Prepared(style, nullptr, doubled));
    const at::Tensor global = leaf(x.detach(), mesh, {Replicate()}), got = tp(global);
    CHECK_FALSE(is_dtensor(got));
    CHECK(close(got.detach(), want.detach() * 2));
    (want * 2).backward(g);
    got.backward(g);
    CHECK(placements_of(global.grad()) == Placements{Replicate()});
    CHECK(close(full_tensor(global.grad()), x.grad()));
    check_parameter_gradients(layer, one);
  }
}

// A style of a user's own.
class ByOutput : public ParallelStyle {
 public:
  void apply(ApplyContext& context) const override { ColwiseParallel().apply(context); }
  std::string name() const override { return "ByOutput"; }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("ParallelStyle", {3}) { check_prepared(ByOutput(), line()); }

TESSERA_RANKS_TEST_CASE("ColwiseParallel", {3}) { check_prepared(ColwiseParallel(), line()); }

TESSERA_RANKS_TEST_CASE("RowwiseParallel", {3}) { check_prepared(RowwiseParallel(), line()); }

TESSERA_RANKS_TEST_CASE("PairwiseParallel", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  Mlp model, one;
  const at::Tensor x = leaf(sample({2 * mesh.size(), 10})), want = one->forward(x), g = sample(want.sizes(), 2);
  SUBCASE("_prepare_input") {
    auto tp = parallelize_module(model, mesh, PairwiseParallel(false, make_input_reshard_replicate));
    const at::Tensor mine = leaf(piece_of(x, mesh, {Shard(0)})), got = tp(mine);
    CHECK_FALSE(is_dtensor(got));
    CHECK(close(got.detach(), want.detach()));
    want.backward(g);
    got.backward(g);
    CHECK(close(mine.grad(), piece_of(x.grad(), mesh, {Shard(0)})));
    check_parameter_gradients(model, one);
  }
  SUBCASE("_prepare_output") {
    auto tp = parallelize_module(model, mesh, PairwiseParallel(false, nullptr, doubled));
    const at::Tensor mine = leaf(x), got = tp(mine);
    CHECK_FALSE(is_dtensor(got));
    CHECK(close(got.detach(), want.detach() * 2));
    (want * 2).backward(g);
    got.backward(g);
    CHECK(close(mine.grad(), x.grad()));
    CHECK(placements_of(model->up->weight.grad()) == Placements{Shard(0)});
    check_parameter_gradients(model, one);
  }
  SUBCASE("without functions, and the same by its two styles and what they prepared") {
    const Expected sums = {.forward = "1 all_reduce", .backward = "1 all_reduce"};
    check_plan(PairwiseParallel(), false, sums, mesh);
    check_plan(ParallelPlan{{"up", Prepared(ColwiseParallel(), make_input_replicate_1d)},
                            {"down", Prepared(RowwiseParallel(), nullptr, make_output_tensor)}},
               false, sums, mesh);
    check_plan(ParallelPlan{{"up", Prepared(ColwiseParallel(), make_input_replicate_1d, make_sharded_output_tensor)},
                            {"down", Prepared(RowwiseParallel(), last_dim, make_output_tensor)}},
               false, sums, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("SequenceParallel", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  SUBCASE("old meaning: pairwise with sequence") {
    check_plan(PairwiseParallel(/*sequence=*/true), true,
               {.forward = "1 all_gather, 1 reduce_scatter", .backward = "1 all_gather, 1 reduce_scatter"}, mesh);
    // The styles themselves have whole inputs and outputs: they reduce the output and the input's gradient, of which
    // the functions then keep a part.
    check_plan(ParallelPlan{{"up", Prepared(ColwiseParallel(), make_input_reshard_replicate)},
                            {"down", Prepared(RowwiseParallel(), nullptr, make_output_reshard_tensor)}},
               true, {.forward = "1 all_gather, 1 all_reduce", .backward = "1 all_gather, 1 all_reduce"}, mesh);
  }
}

namespace {

using Function = std::function<at::Tensor(const at::Tensor&, const MaybeMesh&)>;

// Checks that the function takes the mesh of a DTensor where none is given, and refuses other meshes.
void check_mesh(const Function& run, const at::Tensor& global, const DeviceMesh& mesh) {
  const DeviceMesh other = init_device_mesh("cpu", {mesh.size()}, {"other"}, world()),
                   plane = mesh_over({1, mesh.size()});
  const at::Tensor given = run(global, mesh), inferred = run(global, std::nullopt);
  CHECK(is_dtensor(given) == is_dtensor(inferred));
  CHECK(same(whole_value(given), whole_value(inferred)));
  check_refused([&] { run(global, other); }, "redistribute it with redistribute_to");
  check_refused([&] { run(global, plane); }, "device_mesh has dims 2 but expected to be 1");
}

// Returns the collectives of one redistribution, as counted() writes them.
std::string collectives(const Placement& from, const Placement& to, const DeviceMesh& mesh) {
  if (mesh.size() == 1 || from == to || from.is_replicate()) return "";
  if (from.is_partial()) return to.is_replicate() ? "1 all_reduce" : "1 reduce_scatter";
  return to.is_replicate() ? "1 all_gather" : "1 all_to_all";
}

// Holds how the input of a function lies, its output, and the output's gradient.
struct Lies {
  Placement input;
  Placement output;
  Placement gradient;
};

// Runs a function on `x`, a leaf of value `whole`, and returns its output. Checks the gradient of x, and the
// collectives of forward and of backward: one redistribution each. The gradient of a pending input is replicated.
at::Tensor run_both_ways(const Function& run, const at::Tensor& x, const at::Tensor& whole, const Lies& lies,
                         const DeviceMesh& mesh) {
  CAPTURE(to_string(lies.input));
  CAPTURE(to_string(lies.output));
  CAPTURE(to_string(lies.gradient));
  const Placement back = lies.input.is_partial() ? Replicate() : lies.input;
  const at::Tensor g = sample(whole.sizes(), 2);
  CommCounter counter(mesh);
  const at::Tensor got = run(x, mesh);
  CHECK(counted(counter) == collectives(lies.input, lies.output, mesh));
  if (got.is_same(x)) return got.detach();  // the layout stays, and nothing was computed
  const at::Tensor given = is_dtensor(got) ? spread(g, mesh, {lies.gradient}) : piece_of(g, mesh, {lies.gradient});
  counter.reset();
  got.backward(given);
  CHECK(counted(counter) == collectives(lies.gradient, back, mesh));
  REQUIRE(is_dtensor(x.grad()) == is_dtensor(x));
  if (is_dtensor(x)) CHECK(placements_of(x.grad()) == Placements{back});
  CHECK(close(is_dtensor(x) ? to_local(x.grad()) : x.grad(), piece_of(g, mesh, {back})));
  return got.detach();
}

// Is the shape of whole tensors that three ranks cut unevenly. A plain piece of one does not tell the size of the
// whole, and the functions then take all pieces to be alike: plain pieces are of another shape.
const std::vector<int64_t> kUneven = {11, 23};

// Checks a function that makes a DTensor of layout `out`, of plain tensors that lie as `in`, or of a DTensor.
void check_input(const Function& run, const Placement& in, const Placement& out, const DeviceMesh& mesh) {
  const at::Tensor even = in.is_shard() ? sample({12, 24}) : sample(kUneven), whole = sample(kUneven);
  for (const Placement& of_gradient : {out, Partial()}) {
    const at::Tensor got = run_both_ways(run, leaf(piece_of(even, mesh, {in})), even, {in, out, of_gradient}, mesh);
    CHECK(placements_of(got) == Placements{out});
    CHECK(same(full_tensor(got), even));
  }
  for (const Placement& lies : {Shard(0), Shard(1), Replicate()}) {
    const at::Tensor changed = run_both_ways(run, leaf(whole, mesh, {lies}), whole, {lies, out, out}, mesh);
    CHECK(placements_of(changed) == Placements{out});
    CHECK(same(full_tensor(changed), whole));
  }
}

void check_input_mesh(const Function& run, const DeviceMesh& mesh) {
  check_mesh(run, spread(sample({12, 24}), mesh, {Shard(0)}), mesh);
  const at::Tensor plain = sample({12, 24});
  CHECK(mesh_of(run(plain, mesh)) == mesh);
  check_refused([&] { run(plain, std::nullopt); }, "device_mesh is not passed nor can be inferred");
}

// Checks a function that gives an output the layout `out`, and returns this rank's piece of it where `local`.
void check_output(const Function& run, const Placement& out, bool local, const DeviceMesh& mesh) {
  const at::Tensor whole = sample(kUneven, 3);
  for (const Placement& lies : {Shard(0), Shard(1), Replicate(), Partial()}) {
    const at::Tensor got = run_both_ways(run, leaf(whole, mesh, {lies}), whole, {lies, out, out}, mesh);
    CHECK(is_dtensor(got) != local);
    if (!local) CHECK(placements_of(got) == Placements{out});
    CHECK(close(local ? got : to_local(got), piece_of(whole, mesh, {out})));
  }
}

void check_output_mesh(const Function& run, const DeviceMesh& mesh) {
  check_mesh(run, spread(sample({12, 24}), mesh, {Shard(0)}), mesh);
}

// Holds the subcases of a function without a dim.
void check_input_function(const Function& run, const Placement& in, const Placement& out) {
  const DeviceMesh mesh = line();
  SUBCASE("input") { check_input(run, in, out, mesh); }
  SUBCASE("device_mesh") { check_input_mesh(run, mesh); }
}
void check_output_function(const Function& run, const Placement& out, bool local) {
  const DeviceMesh mesh = line();
  SUBCASE("output") { check_output(run, out, local, mesh); }
  SUBCASE("device_mesh") { check_output_mesh(run, mesh); }
}

// Returns the function with its default dim, or with another one.
Function input_shard(int64_t dim) {
  return [=](const at::Tensor& t, const MaybeMesh& mesh) { return make_input_shard_1d(t, mesh, dim); };
}
Function output_shard(int64_t dim) {
  return [=](const at::Tensor& t, const MaybeMesh& mesh) { return make_output_shard_1d(t, mesh, dim); };
}

}  // namespace

TESSERA_RANKS_TEST_CASE("make_input_replicate_1d", {1, 3}) {
  check_input_function(make_input_replicate_1d, Replicate(), Replicate());
}

TESSERA_RANKS_TEST_CASE("make_input_reshard_replicate", {1, 3}) {
  check_input_function(make_input_reshard_replicate, Shard(0), Replicate());
}

TESSERA_RANKS_TEST_CASE("make_input_shard_1d", {1, 3}) {
  const DeviceMesh mesh = line();
  SUBCASE("input") {
    check_input([](const at::Tensor& t, const MaybeMesh& m) { return make_input_shard_1d(t, m); }, Shard(0), Shard(0),
                mesh);
  }
  SUBCASE("device_mesh") { check_input_mesh(input_shard(0), mesh); }
  SUBCASE("dim") {
    for (const int64_t dim : {0, 1}) check_input(input_shard(dim), Shard(dim), Shard(dim), mesh);
  }
}

TESSERA_RANKS_TEST_CASE("make_input_shard_1d_last_dim", {1, 3}) {
  check_input_function(make_input_shard_1d_last_dim, Shard(1), Shard(1));
}

TESSERA_RANKS_TEST_CASE("make_output_replicate_1d", {1, 3}) {
  check_output_function(make_output_replicate_1d, Replicate(), /*local=*/false);
}

TESSERA_RANKS_TEST_CASE("make_output_reshard_tensor", {1, 3}) {
  check_output_function(make_output_reshard_tensor, Shard(0), /*local=*/true);
}

TESSERA_RANKS_TEST_CASE("make_output_tensor", {1, 3}) {
  check_output_function(make_output_tensor, Replicate(), /*local=*/true);
}

TESSERA_RANKS_TEST_CASE("make_output_shard_1d", {1, 3}) {
  const DeviceMesh mesh = line();
  SUBCASE("output") {
    check_output([](const at::Tensor& t, const MaybeMesh& m) { return make_output_shard_1d(t, m); }, Shard(0), false,
                 mesh);
  }
  SUBCASE("device_mesh") { check_output_mesh(output_shard(0), mesh); }
  SUBCASE("dim") {
    for (const int64_t dim : {0, 1}) check_output(output_shard(dim), Shard(dim), false, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("make_sharded_output_tensor", {1, 3}) {
  const DeviceMesh mesh = line();
  SUBCASE("output") {
    const at::Tensor whole = sample(kUneven);
    for (const Placement& lies : {Shard(0), Shard(1), Replicate()}) {
      const at::Tensor got =
          run_both_ways(make_sharded_output_tensor, leaf(whole, mesh, {lies}), whole, {lies, lies, lies}, mesh);
      CHECK(same(got, piece_of(whole, mesh, {lies})));
    }
    check_refused([&] { make_sharded_output_tensor(spread(whole, mesh, {Partial()}), mesh); },
                  "is a pending reduction");
  }
  SUBCASE("_device_mesh") { check_output_mesh(make_sharded_output_tensor, mesh); }
}

TESSERA_RANKS_TEST_CASE("errors: no mesh, mesh not 1-D, wrong input type, output not a DTensor", {2}) {
  const DeviceMesh mesh = line(), plane = mesh_over({2, 1});
  const at::Tensor x = sample({4, 4}), d = spread(x, mesh, {Shard(0)});
  for (const Function& run : std::vector<Function>{input_shard(0), make_input_shard_1d_last_dim,
                                                   make_input_replicate_1d, make_input_reshard_replicate}) {
    check_refused([&] { run(x, std::nullopt); }, "device_mesh is not passed nor can be inferred");
    check_refused([&] { run(x, plane); }, "device_mesh has dims 2 but expected to be 1 for input");
    check_refused([&] { run({}, mesh); }, "expects torch.Tensor or DTensor input but received");
  }
  for (const Function& run : std::vector<Function>{output_shard(0), make_output_replicate_1d, make_output_tensor,
                                                   make_output_reshard_tensor, make_sharded_output_tensor}) {
    check_refused([&] { run(d, plane); }, "device_mesh has dims 2 but expected to be 1 for output");
    check_refused([&] { run(x, mesh); }, "Expect output of Tensor Parallel to be a DTensor, but found a plain tensor");
    check_refused([&] { run(x, std::nullopt); }, "Expect output of Tensor Parallel to be a DTensor");
  }
}
