// Checks that every strategy that a rule could offer and does not is listed with its reason, and checks the finder
// itself on rules from which strategies were removed.

#include <fstream>
#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/ops/rules/forms.h"

namespace tessera::testing {
namespace {

using Lines = std::set<std::string>;

// "aten::add.Tensor | P(max), R -> P(max)"
Lines found() {
  at::set_num_threads(1);  // threads do not survive in a child process
  Lines out;
  for (const Draws& draws : forms()) {
    std::istringstream lines(in_child([&] { return findings(draws); }));
    for (std::string line; std::getline(lines, line);) out.insert(fmt::format("{} | {}", draws[0].op, line));
  }
  return out;
}

// Holds the table's lines without their reasons.
struct Known {
  Lines lines;
  std::vector<std::string> wrong;  // out of order, or with a reason that the table does not explain
};

Known known() {
  std::ifstream in("tests/ops/rules/known_missing.txt");
  REQUIRE(in.good());
  Known out;
  std::set<std::string> reasons;
  std::string last;
  for (std::string line; std::getline(in, line);) {
    if (line.empty()) continue;
    if (line.starts_with("# ")) {
      reasons.insert(line.substr(2, line.find(':') - 2));
      continue;
    }
    const auto at = line.rfind(" | ");
    if (at == std::string::npos || !reasons.contains(line.substr(at + 3)) || line <= last) out.wrong.push_back(line);
    out.lines.insert(line.substr(0, at));
    last = line;
  }
  return out;
}

TEST_CASE("every strategy that is missing is known, and what is known to be missing is") {
  const Known table = known();
  for (const std::string& line : table.wrong) FAIL_CHECK("out of order, twice, or without a known reason: " << line);
  const Lines now = found();
  MESSAGE(now.size());
  for (const std::string& line : now) {
    CHECK_MESSAGE(
        table.lines.contains(line),
        fmt::format("a rule could offer this: {}\nAdd it to the rule, or to known_missing.txt with a reason.", line));
  }
  for (const std::string& line : table.lines) {
    CHECK_MESSAGE(now.contains(line), fmt::format("no longer missing, take it from known_missing.txt: {}", line));
  }
}

// ---- rules from which strategies were removed

rules::OpRule product(std::string_view without) {
  rules::OpRule rule{.strategies = rules::shard_factors({"mk", "kn"}, {"mn"})};
  rules::add_linear(rule, 2, 1, {{0}, {1}});
  std::erase_if(rule.strategies, [&](const rules::Strategy& s) { return to_string(s) == without; });
  return rule;
}

std::vector<std::string> missing_of(const std::string& name, rules::RuleFn rule, const std::function<Sample()>& draw) {
  rules::register_rule(name, rule);
  at::manual_seed(5);
  Draws draws;
  for (int i = 0; i < 3; ++i) {
    draws.push_back(draw());
    draws.back().rule = name;
  }
  std::vector<std::string> out;
  for (const rules::Strategy& s : missing_strategies(draws)) out.push_back(to_string(s));
  return out;
}

Sample mm() { return {.op = "aten::mm", .args = {at::randn({5, 3}, at::kDouble), at::randn({3, 4}, at::kDouble)}}; }
Sample tanh() { return {.op = "aten::tanh", .args = {at::randn({5, 3}, at::kDouble)}}; }

TEST_CASE("the finder names the strategy that was taken from a rule, and nothing of a rule that has them all") {
  using Texts = std::vector<std::string>;
  CHECK(missing_of(
            "tessera_missing::mm", [](const rules::OpCall&) { return product(""); }, mm) == Texts{});
  CHECK(missing_of(
            "tessera_missing::mm_rows", [](const rules::OpCall&) { return product("S(0), R -> S(0)"); }, mm) ==
        Texts{"S(0), R -> S(0)"});
  CHECK(missing_of(
            "tessera_missing::mm_inner", [](const rules::OpCall&) { return product("S(1), S(0) -> P(sum)"); }, mm) ==
        Texts{"S(1), S(0) -> P(sum)"});
  CHECK(missing_of(
            "tessera_missing::mm_linear", [](const rules::OpCall&) { return product("R, P(sum) -> P(sum)"); }, mm) ==
        Texts{"R, P(sum) -> P(sum)"});
}

TEST_CASE(
    "the finder names the cuts of a rule that has none, a result that is left pending, and no sum through what is not "
    "linear") {
  const auto none = [](const rules::OpCall&) { return rules::OpRule{}; };
  CHECK(missing_of("tessera_missing::tanh", none, tanh) ==
        std::vector<std::string>{"S(0) -> S(0)", "S(1) -> S(1)", "P(max) -> P(max)", "P(min) -> P(min)"});
  const auto pending = [](const rules::OpCall&) {
    rules::OpRule rule{.strategies = rules::shard_factors({"ab"}, {"ab"})};
    rule.strategies[0].outputs[0] = Partial();
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin})
      rule.strategies.push_back(rules::pass_partial(1, 1, {0}, op));
    return rule;
  };
  CHECK(missing_of("tessera_missing::tanh_pending", pending, tanh) == std::vector<std::string>{"S(0) -> S(0)"});
}

TEST_CASE("a kernel that ends its process ends no test") {
  CHECK(in_child([] { return std::string("done\n"); }) == "done\n");
  CHECK(in_child([]() -> std::string { std::abort(); }) == "ended by signal 6\n");
}

}  // namespace
}  // namespace tessera::testing
