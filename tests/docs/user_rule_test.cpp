// Holds the test of a rule in docs/custom-placement.md, and what it finds where the rule is wrong.

#include <limits>
#include <memory>
#include <stdexcept>

#include <torch/library.h>
#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/ops/rules/rule.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/ops/rules/rule_checks.h"

namespace {

using tessera::rules::OpCall;
using tessera::rules::OpRule;

at::Tensor scale_rows_cpu(const at::Tensor& x, const at::Tensor& scale) { return x * scale.unsqueeze(1); }
at::Tensor scale_rows_meta(const at::Tensor& x, const at::Tensor&) { return at::empty_like(x); }

void twice_cpu(const at::Tensor& x) { x.mul_(2); }
at::Tensor last_cpu(const at::Tensor& x) { return x.logsumexp(0); }

TORCH_LIBRARY(mylib, m) {
  m.def("scale_rows(Tensor x, Tensor scale) -> Tensor");
  m.def("twice(Tensor(a!) x) -> ()");
  m.def("last(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(mylib, CPU, m) {
  m.impl("scale_rows", scale_rows_cpu);
  m.impl("twice", twice_cpu);
  m.impl("last", last_cpu);
}
TORCH_LIBRARY_IMPL(mylib, Meta, m) { m.impl("scale_rows", scale_rows_meta); }

OpRule scale_rows_rule(const OpCall&) {
  OpRule rule{.strategies = tessera::rules::shard_factors({"nm", "n"}, {"nm"})};
  tessera::rules::add_linear(rule, /*num_inputs=*/2, /*num_outputs=*/1, {{0}, {1}});
  return rule;
}

// Adds products of sums as if they were sums of products.
OpRule both_pending(const OpCall&) {
  OpRule rule;
  tessera::rules::add_linear(rule, /*num_inputs=*/2, /*num_outputs=*/1, {{0, 1}});
  return rule;
}

// Takes the rows of x for its columns.
OpRule other_letters(const OpCall&) { return {.strategies = tessera::rules::shard_factors({"mn", "n"}, {"mn"})}; }

OpRule nothing(const OpCall&) { return {}; }

OpRule by_kernel(const OpCall&) {
  return {.strategies = tessera::rules::shard_factors({"nm", "n"}, {"nm"}), .kernel = "mine"};
}

OpRule rows(const OpCall&) { return {.strategies = tessera::rules::shard_factors({"nm"}, {})}; }

// The value is log(sum(exp(piece))).
class LogSumExp final : public tessera::Reduction {
 public:
  LogSumExp() : Reduction("lse", tessera::ReduceOp::kSum) {}
  at::Tensor to_term(const at::Tensor& piece) const override { return piece.exp(); }
  at::Tensor from_terms(const at::Tensor& terms, int64_t) const override { return terms.log(); }
  c10::Scalar neutral(at::ScalarType) const override { return -std::numeric_limits<double>::infinity(); }
};

OpRule pending_by_user(const OpCall&) {
  const tessera::Placement pending = tessera::Partial(std::make_shared<const LogSumExp>());
  return {.strategies = {{.inputs = {tessera::Shard(0)}, .outputs = {pending}}}};
}

OpRule wrongly_pending_by_user(const OpCall&) {
  const tessera::Placement pending = tessera::Partial(std::make_shared<const LogSumExp>());
  return {.strategies = {{.inputs = {tessera::Replicate()}, .outputs = {pending}}}};
}

}  // namespace

TEST_CASE("every strategy of the rule gives what whole tensors give") {
  tessera::rules::register_rule("mylib::scale_rows", scale_rows_rule);
  CHECK_NOTHROW(tessera::testing::check_rule("mylib::scale_rows", {torch::randn({6, 3}), torch::randn({6})}));
}

TEST_CASE("check_rule finds wrong strategies, and rules that offer none") {
  const auto refused = [](tessera::rules::RuleFn rule, const char* text) {
    tessera::rules::register_rule("mylib::scale_rows", rule);
    CHECK_THROWS_WITH_AS(tessera::testing::check_rule("mylib::scale_rows", {torch::randn({4, 4}), torch::randn({4})}),
                         doctest::Contains(text), std::runtime_error);
  };
  refused(both_pending, "6 of 6 runs differ from the whole tensors:\n[P(sum), P(sum)] -> [P(sum)]");
  refused(other_letters, "[S(1), S(0)] -> [S(1)]");
  refused(nothing, "offers no strategy");
  refused(by_kernel, "local kernels of your own, such as mine, are not run in one process");
}

TEST_CASE("check_rule runs operators without results, and reductions of a user") {
  tessera::rules::register_rule("mylib::twice", rows);
  CHECK_NOTHROW(tessera::testing::check_rule("mylib::twice", {torch::randn({4, 4})}));
  tessera::rules::register_rule("mylib::last", pending_by_user);
  CHECK_NOTHROW(tessera::testing::check_rule("mylib::last", {torch::randn({6, 4})}));
  tessera::rules::register_rule("mylib::last", wrongly_pending_by_user);
  CHECK_THROWS_AS(tessera::testing::check_rule("mylib::last", {torch::randn({6, 4})}), std::runtime_error);
}
