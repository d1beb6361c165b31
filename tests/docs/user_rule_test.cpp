// Holds the test of a rule in docs/custom-placement.md, and what it finds where the rule is wrong.

#include <stdexcept>

#include <torch/library.h>
#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/ops/rules/rule.h"
#include "tessera/tests/ops/rules/rule_checks.h"

namespace {

using tessera::rules::OpCall;
using tessera::rules::OpRule;

at::Tensor scale_rows_cpu(const at::Tensor& x, const at::Tensor& scale) { return x * scale.unsqueeze(1); }
at::Tensor scale_rows_meta(const at::Tensor& x, const at::Tensor&) { return at::empty_like(x); }

TORCH_LIBRARY(mylib, m) { m.def("scale_rows(Tensor x, Tensor scale) -> Tensor"); }
TORCH_LIBRARY_IMPL(mylib, CPU, m) { m.impl("scale_rows", scale_rows_cpu); }
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
}
