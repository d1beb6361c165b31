// Tests kernels for pieces, and decompositions, that a user registers for operators of their own.

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
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

constexpr std::string_view kNumberedPiece = "own::numbered_piece";

// They count calls in this process, which is one rank.
int64_t numbered_pieces = 0;
int64_t decomposed_calls = 0;

at::Tensor call_own(const char* name, const at::Tensor& x) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<at::Tensor(const at::Tensor&)>().call(x);
}

at::Tensor add_own(const at::Tensor& x, const at::Tensor& y) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("own::add", "")
      .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>()
      .call(x, y);
}

// Multiplies each row of x [n, m] by its number, from 1 on: on a piece that begins at another row it would be wrong.
at::Tensor numbered(const at::Tensor& x) { return x * (at::arange(x.size(0), x.options()) + 1).unsqueeze(1); }
at::Tensor doubled(const at::Tensor& x) { return x * 2; }
at::Tensor added(const at::Tensor& x, const at::Tensor& y) { return x + y; }

struct Numbered : torch::autograd::Function<Numbered> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_own("own::numbered", x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*ctx*/,
                                               const torch::autograd::tensor_list& grads) {
    return {call_own("own::numbered", grads[0])};
  }
};

// Computes `numbered` on this rank's rows, whose numbers the layout says.
void numbered_piece(const LocalCall& call, torch::jit::Stack& stack) {
  ++numbered_pieces;
  const at::Tensor piece = stack[0].toTensor();
  std::vector<at::Tensor> numbers;
  for (const Interval& rows : call.inputs[0]->tile[0]) {
    numbers.push_back(at::arange(rows.begin + 1, rows.end + 1, piece.options()));
  }
  stack.assign({piece * at::cat(numbers).unsqueeze(1)});
}

// Cuts rows or columns, for which the kernel is needed. Whole tensors and terms of a sum need none.
rules::OpRule numbered_rule(const rules::OpCall& op) {
  rules::OpRule rule{.strategies = rules::shard_factors({"nm"}, {"nm"})};
  for (rules::Strategy& each : rule.strategies) each.kernel = kNumberedPiece;
  rules::add_linear(rule, 1, 1, {{0}});
  rule.outputs = {op.inputs[0]};
  return rule;
}

// Every rank takes part in the all_reduce, also one without rows.
void scaled_piece(const LocalCall& call, torch::jit::Stack& stack) {
  const at::Tensor piece = stack[0].toTensor();
  const at::Tensor here = piece.numel() > 0 ? piece.max() : at::full({}, -1, piece.options());
  stack.assign({piece / all_reduce(here, call.inputs[0]->mesh, 0, ReduceOp::kMax)});
}

rules::OpRule scaled_rule(const rules::OpCall& op) {
  rules::OpRule rule{.strategies = rules::shard_factors({"n"}, {"n"})};
  rule.strategies[0].kernel = "own::scaled_piece";
  rule.outputs = {op.inputs[0]};
  return rule;
}

// hardshrink(x, 0) is x, so that there a sum may stay pending.
rules::RuleFn usual_hardshrink = nullptr;
rules::OpRule hardshrink_rule(const rules::OpCall& op) {
  rules::OpRule rule = usual_hardshrink(op);
  if (op.arg("lambd").toScalar().toDouble() == 0) rules::add_linear(rule, 1, 1, {{0}});
  return rule;
}

rules::OpRule too_long_rule(const rules::OpCall& op) {
  rules::OpRule rule{.strategies = rules::shard_factors({"nmk"}, {"nmk"})};
  rule.outputs = {op.inputs[0]};
  return rule;
}

rules::OpRule lost_rule(const rules::OpCall& op) {
  rules::OpRule rule{.strategies = rules::shard_factors({"nm"}, {"nm"}), .kernel = "own::no_kernel"};
  rule.outputs = {op.inputs[0]};
  return rule;
}

rules::OpRule silent_rule(const rules::OpCall& op) {
  rules::OpRule rule{.strategies = rules::shard_factors({"nm"}, {"nm"}), .kernel = "own::silent_piece"};
  rule.outputs = {op.inputs[0]};
  return rule;
}
void silent_piece(const LocalCall& /*call*/, torch::jit::Stack& stack) { stack.clear(); }

// Leaves vectors to the rules.
bool double_by_add(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  const at::Tensor x = torch::jit::peek(stack, 0, 1).toTensor();
  if (x.dim() != 2) return false;
  ++decomposed_calls;
  torch::jit::drop(stack, 1);
  torch::jit::push(stack, x + x);
  return true;
}

bool add_by_add(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  ++decomposed_calls;
  const at::Tensor x = torch::jit::peek(stack, 0, 2).toTensor(), y = torch::jit::peek(stack, 1, 2).toTensor();
  torch::jit::drop(stack, 2);
  torch::jit::push(stack, x + y);
  return true;
}

// Returns how many decompositions `body` has run.
template <typename Body>
int64_t decompositions_in(const Body& body) {
  const int64_t before = decomposed_calls;
  body();
  return decomposed_calls - before;
}

TORCH_LIBRARY(own, m) {
  m.def("numbered(Tensor x) -> Tensor");
  m.def("lost(Tensor x) -> Tensor");
  m.def("silent(Tensor x) -> Tensor");
  m.def("twice(Tensor x) -> Tensor");
  m.def("twice_in_inference(Tensor x) -> Tensor");
  m.def("add(Tensor x, Tensor y) -> Tensor");
  m.def("scaled_by_max(Tensor x) -> Tensor");
  m.def("composed(Tensor x) -> Tensor", doubled);
}
void add_own_kernels(torch::Library& m) {
  m.impl("numbered", numbered);
  m.impl("lost", numbered);
  m.impl("silent", numbered);
  m.impl("twice", doubled);
  m.impl("twice_in_inference", doubled);
  m.impl("add", added);
  m.impl("scaled_by_max", [](const at::Tensor& x) { return x / x.max(); });
}
TORCH_LIBRARY_IMPL(own, CPU, m) { add_own_kernels(m); }
TORCH_LIBRARY_IMPL(own, CUDA, m) { add_own_kernels(m); }
TORCH_LIBRARY_IMPL(own, Autograd, m) {
  m.impl("numbered", [](const at::Tensor& x) { return Numbered::apply(x); });
}

[[maybe_unused]] const bool kOwnRegistered =
    register_local_kernel(kNumberedPiece, numbered_piece) && register_local_kernel("own::silent_piece", silent_piece) &&
    register_local_kernel("own::scaled_piece", scaled_piece, {.communicates = true}) &&
    register_decomposition("own::twice", double_by_add) &&
    register_decomposition("own::twice_in_inference", double_by_add, DecomposedCalls::kInInference) &&
    register_decomposition("own::add", add_by_add, DecomposedCalls::kBesidePlainInInference);

}  // namespace

TESSERA_RANKS_TEST_CASE("a user's local kernel computes the pieces of a result, forward and backward", {1, 2, 3}) {
  rules::register_rule("own::numbered", numbered_rule);
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3}), grad = sample({5, 3}, 1), plain = leaf(whole);
  call_own("own::numbered", plain).backward(grad);
  CHECK(close(plain.grad(), numbered(grad)));
  for (const Placement& placement : {S0, S1, BlockCyclic(0, 1), R, P}) {
    CAPTURE(to_string(placement));
    const at::Tensor x = leaf(whole, mesh, {placement});
    const int64_t before = numbered_pieces;
    const CommCounter counter(mesh);
    const at::Tensor y = call_own("own::numbered", x);
    const int64_t collectives = counter.total(), forward = numbered_pieces - before;
    // The gradient of terms is whole.
    y.backward(spread(grad, mesh, {placement.is_partial() ? R : placement}));
    const int64_t backward = numbered_pieces - before - forward;
    if (mesh.size() > 1) {
      CHECK(collectives == 0);
      CHECK(placements_of(y) == Placements{placement});
      CHECK(forward == (placement.is_shard() ? 1 : 0));
      CHECK(backward == forward);
    }
    CHECK(close(full_tensor(y.detach()), numbered(whole)));
    CHECK(close(full_tensor(x.grad()), plain.grad()));
  }
}

TEST_CASE("a local kernel that leaves no result is named") {
  rules::register_rule("own::silent", silent_rule);
  CHECK_THROWS_WITH_AS(run_in_process(2,
                                      [](const std::shared_ptr<World>& world) {
                                        const DeviceMesh mesh = init_device_mesh(device_name(), {2}, {}, world);
                                        call_own("own::silent", spread(sample({5, 3}), mesh, {S0}));
                                      }),
                       doctest::Contains("own::silent: its local kernel has left 0 values on the stack"),
                       std::runtime_error);
}

TESSERA_RANKS_TEST_CASE("a local kernel whose name is taken, or that is not there, is refused", {1, 2, 3}) {
  CHECK((find_local_kernel(kNumberedPiece).kernel == numbered_piece));
  CHECK_THROWS_WITH_AS(register_local_kernel(kNumberedPiece, numbered_piece),
                       doctest::Contains("two local kernels are called \"own::numbered_piece\""), std::logic_error);
  const char* const text = "a sharding rule names the local kernel \"own::no_kernel\", which is not there";
  CHECK_THROWS_WITH_AS(find_local_kernel("own::no_kernel"), doctest::Contains(text), std::logic_error);
  rules::register_rule("own::lost", lost_rule);
  const at::Tensor x = spread(sample({5, 3}), line(), {S0});
  CHECK_THROWS_WITH_AS(call_own("own::lost", x), doctest::Contains(text), std::logic_error);
}

TESSERA_RANKS_TEST_CASE("a user's decomposition runs for the calls that it names, and leaves others to the rules",
                        {1, 2, 3}) {
  CHECK((find_decomposition("own::twice").run == double_by_add));
  CHECK((find_decomposition("own::twice").calls == DecomposedCalls::kAll));
  CHECK((find_decomposition("own::no_operator").run == nullptr));
  CHECK_FALSE(register_decomposition("own::twice", double_by_add));
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3}), other = sample({5, 3}, 1), vector = sample({5});
  for (const Placement& placement : {R, S0, P}) {
    CAPTURE(to_string(placement));
    at::Tensor y;
    CHECK(decompositions_in([&] { y = call_own("own::twice", spread(whole, mesh, {placement})); }) == 1);
    if (mesh.size() > 1) CHECK(placements_of(y) == Placements{placement});
    CHECK(close(full_tensor(y), whole * 2));
    CHECK(decompositions_in([&] { y = call_own("own::twice", spread(vector, mesh, {placement})); }) == 0);
    CHECK(close(full_tensor(y), vector * 2));
    const auto in_inference = [&] { y = call_own("own::twice_in_inference", spread(whole, mesh, {placement})); };
    CHECK(decompositions_in(in_inference) == 0);
    CHECK(close(full_tensor(y), whole * 2));
    CHECK(decompositions_in([&] { y = add_own(spread(whole, mesh, {placement}), spread(other, mesh, {R})); }) == 0);
    CHECK(close(full_tensor(y), whole + other));
    const c10::InferenceMode inference;
    CHECK(decompositions_in(in_inference) == 1);
    CHECK(close(full_tensor(y), whole * 2));
    const ImplicitReplication plain_counts;
    CHECK(decompositions_in([&] { y = add_own(spread(whole, mesh, {placement}), other); }) == 1);
    CHECK(close(full_tensor(y), whole + other));
  }
}

TESSERA_RANKS_TEST_CASE("a local kernel that communicates runs on ranks without elements too", {1, 2, 3}) {
  rules::register_rule("own::scaled_by_max", scaled_rule);
  const DeviceMesh mesh = line();
  for (const int64_t size : {1, 2, 5}) {
    const at::Tensor whole = whole_numbers({size}, at::kDouble).abs() + 1;
    CHECK(close(full_tensor(call_own("own::scaled_by_max", spread(whole, mesh, {S0}))), whole / whole.max()));
  }
}

TESSERA_RANKS_TEST_CASE("a rule in the place of one of LibTorch's is asked for each value of a number", {1, 2, 3}) {
  if (usual_hardshrink == nullptr) usual_hardshrink = rules::find_rule("aten::hardshrink");
  rules::register_rule("aten::hardshrink", hardshrink_rule);
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({5}), mesh, {P}), whole = full_tensor(x);
  const at::Tensor same = at::hardshrink(x, 0.0), shrunk = at::hardshrink(x, 0.5);
  if (mesh.size() > 1) CHECK(placements_of(same) == Placements{P});
  CHECK(close(full_tensor(same), whole));
  CHECK(close(full_tensor(shrunk), at::hardshrink(whole, 0.5)));
  rules::register_rule("aten::hardshrink", usual_hardshrink);
}

TESSERA_RANKS_TEST_CASE("a rule that would never be asked, or labels a dimension that is not there, is refused",
                        {1, 2}) {
  CHECK_THROWS_WITH_AS(rules::register_rule("own::composed", numbered_rule),
                       doctest::Contains("register_rule: own::composed has a kernel for all devices "
                                         "(CompositeImplicitAutograd)"),
                       std::invalid_argument);
  const at::Tensor x = spread(sample({5, 3}), line(), {S0});
  rules::register_rule("own::lost", too_long_rule);
  CHECK_THROWS_WITH_AS(
      call_own("own::lost", x * 1),
      doctest::Contains("own::lost: its sharding rule has a strategy with S(2) for input 0, which has 2"),
      std::logic_error);
}
