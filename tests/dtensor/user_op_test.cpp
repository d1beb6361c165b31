// Tests operators that a user registers.

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/ops/rules/rule.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor sort_rows(const at::Tensor& x) { return std::get<0>(x.sort(0)); }
at::Tensor triple(const at::Tensor& x) { return x * 3; }
at::Tensor square(const at::Tensor& x) { return x * x; }

at::Tensor noise(const at::Tensor& x) { return x + at::rand_like(x); }
void bump(const at::Tensor& x, const at::Tensor& y) {
  x.add_(1);
  y.mul_(2);
}

at::Tensor call(const char* name, const at::Tensor& x) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<at::Tensor(const at::Tensor&)>().call(x);
}

void call_bump(const at::Tensor& x, const at::Tensor& y) {
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("user::bump", "")
      .typed<void(const at::Tensor&, const at::Tensor&)>()
      .call(x, y);
}

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    const at::AutoDispatchBelowADInplaceOrView below;
    return call("user::square", x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    return {grads[0] * 2 * ctx->get_saved_variables()[0]};
  }
};

rules::OpRule linear_rule(const rules::OpCall& op) {
  const rules::Labels all = rules::letters(op.inputs[0].sizes.size());
  rules::OpRule rule{.strategies = rules::shard_factors({all}, {all})};
  rules::add_linear(rule, 1, 1, {{0}});
  rule.outputs = {op.inputs[0]};
  return rule;
}

TORCH_LIBRARY(user, m) {
  m.def("sort_rows(Tensor x) -> Tensor");
  m.def("triple(Tensor x) -> Tensor");
  m.def("square(Tensor x) -> Tensor");
  m.def("noise(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("bump(Tensor(a!) x, Tensor(b!) y) -> ()");
  m.def("composed(Tensor x) -> Tensor", [](const at::Tensor& x) { return (x + 1).pow(2).mean(0); });
}
void add_kernels(torch::Library& m) {
  m.impl("sort_rows", sort_rows);
  m.impl("triple", triple);
  m.impl("square", square);
  m.impl("noise", noise);
  m.impl("bump", bump);
}
TORCH_LIBRARY_IMPL(user, CPU, m) { add_kernels(m); }
TORCH_LIBRARY_IMPL(user, CUDA, m) { add_kernels(m); }
TORCH_LIBRARY_IMPL(user, Autograd, m) {
  m.impl("square", [](const at::Tensor& x) { return Square::apply(x); });
}

}  // namespace

TESSERA_RANKS_TEST_CASE("an operator without a rule is replicated, right, and counted", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3});
  for (const Placement& placement : {R, S0, P}) {
    const auto before = dispatch_statistics();
    const at::Tensor y = call("user::sort_rows", spread(whole, mesh, {placement}));
    CHECK(dispatch_statistics().replicated == before.replicated + 1);
    CHECK(placements_of(y) == Placements{R});
    CHECK(close(full_tensor(y), sort_rows(whole)));
  }
  if (mesh.size() == 1) return;
  const Strict strict;
  CHECK_THROWS_WITH_AS(call("user::sort_rows", spread(whole, mesh, {S0})),
                       doctest::Contains("user::sort_rows: would communicate on its own, which Strict forbids"),
                       std::runtime_error);
  CHECK(same(full_tensor(call("user::sort_rows", spread(whole, mesh, {R}))), sort_rows(whole)));
}

TESSERA_RANKS_TEST_CASE("an operator with autograd of its own, one composed of others, one without", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {R, S0, P}) {
    CAPTURE(to_string(placement));
    for (const char* name : {"user::square", "user::composed"}) {
      CAPTURE(name);
      const at::Tensor want = sample({5, 3}).requires_grad_(true);
      call(name, want).sum().backward();
      const at::Tensor x = spread(sample({5, 3}), mesh, {placement}).requires_grad_(true);
      const at::Tensor y = call(name, x);
      y.sum().backward();
      CHECK(close(full_tensor(y.detach()), call(name, sample({5, 3}))));
      CHECK(close(full_tensor(x.grad()), want.grad()));
    }
    // Without autograd it runs, and throws when a gradient is computed through it.
    const at::Tensor x = spread(sample({5, 3}), mesh, {placement}).requires_grad_(true);
    CHECK(close(full_tensor(call("user::sort_rows", x).detach()), sort_rows(sample({5, 3}))));
  }
}

TESSERA_RANKS_TEST_CASE("a user's rule lets pieces and terms through", {2, 3}) {
  rules::register_rule("user::triple", linear_rule);
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3});
  for (const Placement& placement : {R, S0, Shard(1), P}) {
    CAPTURE(to_string(placement));
    const CommCounter counter(mesh);
    const at::Tensor y = call("user::triple", spread(whole, mesh, {placement}));
    CHECK(counter.total() == 0);
    CHECK(placements_of(y) == Placements{placement});
    CHECK(close(full_tensor(y), whole * 3));
  }
}

TESSERA_RANKS_TEST_CASE("an operator that draws in its own kernel draws as one rank does, also where its rule cuts",
                        {1, 2, 3}) {
  rules::register_rule("user::noise", linear_rule);
  const DeviceMesh mesh = line();
  const at::Tensor whole = at::zeros({6, 3}, on(at::kDouble));
  for (const Placement& placement : {R, S0, P}) {
    CAPTURE(to_string(placement));
    manual_seed(7, mesh);
    const at::Tensor want = full_tensor(call("user::noise", spread(whole, mesh, {R})));
    manual_seed(7, mesh);
    const at::Tensor got = full_tensor(call("user::noise", spread(whole, mesh, {placement})));
    CHECK(same(got, want));
    CHECK(std::get<0>(at::unique_dim(got, 0)).size(0) == 6);  // no row is another one's
  }
}

TESSERA_RANKS_TEST_CASE(
    "a tensor that is two written arguments is written twice, and parts that interleave are told apart", {1, 2}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {R, S0}) {
    CAPTURE(to_string(placement));
    const at::Tensor x = spread(sample({4, 3}), mesh, {placement}), y = spread(sample({4, 3}), mesh, {placement});
    call_bump(x, x);
    CHECK(close(full_tensor(x), (sample({4, 3}) + 1) * 2));
    call_bump(x, y);
    CHECK(close(full_tensor(x), (sample({4, 3}) + 1) * 2 + 1));
    CHECK(close(full_tensor(y), sample({4, 3}) * 2));
    // Two columns of one tensor have gaps, and nothing in common.
    call_bump(y.select(1, 0), y.select(1, 2));
    at::Tensor want = sample({4, 3}) * 2;
    want.select(1, 0).add_(1);
    want.select(1, 2).mul_(2);
    CHECK(close(full_tensor(y), want));
  }
}

TEST_CASE("written arguments that overlap are refused where they are computed in copies") {
  using Part = at::Tensor (*)(const at::Tensor&);
  for (const Part part :
       {Part([](const at::Tensor& x) { return x.slice(0, 1, 3); }),
        Part([](const at::Tensor& x) { return x.select(1, 0); }), Part([](const at::Tensor& x) { return x.conj(); })}) {
    const auto run = [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), {2}, {}, world);
      const at::Tensor x = spread(at::complex(sample({4, 3}), sample({4, 3}, 1)), mesh, {R});
      call_bump(x, part(x));
    };
    CHECK_THROWS_WITH_AS(run_in_process(2, run), doctest::Contains("two arguments that it writes overlap"),
                         std::runtime_error);
  }
}

TEST_CASE("shard_factors refuses a letter that stands twice in one tensor") {
  CHECK_THROWS_WITH_AS(rules::shard_factors({"nn"}, {"n"}), doctest::Contains("the letter n stands twice in \"nn\""),
                       std::logic_error);
  CHECK_NOTHROW(rules::shard_factors({"--n"}, {"n"}));
}
