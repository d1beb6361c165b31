// Every operator, as docs/operators.md says; and the validator itself, on rules that are wrong.

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "tessera/ops/rules/rule.h"
#include "tessera/tests/operators/calls.h"
#include "tessera/tests/operators/survey.h"

namespace tessera::testing {
namespace {

const std::vector<Entry>& entries() {
  static const auto all = [] {
    std::vector<Entry> out;
    for (const std::string& overload : tensor_overloads()) out.push_back(survey(overload));
    return out;
  }();
  return all;
}

std::vector<Entry> of(Status status) {
  std::vector<Entry> out;
  std::copy_if(entries().begin(), entries().end(), std::back_inserter(out),
               [&](const Entry& e) { return e.status == status; });
  return out;
}

std::string read(const std::string& path) {
  std::ifstream in(path);
  REQUIRE_MESSAGE(in.good(), path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

TEST_CASE("no operator is wrong") {
  for (const Entry& entry : of(Status::kWrong)) FAIL_CHECK(fmt::format("{}: {}", entry.overload, entry.text));
}

TEST_CASE("1,200 overloads are called, 1,000 are right by rule") {
  const std::size_t by_rule = of(Status::kByRule).size();
  const std::size_t called =
      by_rule + of(Status::kReplicated).size() + of(Status::kRefused).size() + of(Status::kWrong).size();
  MESSAGE(fmt::format("{} called, {} right by rule, {} by replicating, {} refused", called, by_rule,
                      of(Status::kReplicated).size(), of(Status::kRefused).size()));
  CHECK(called >= 1200);
  CHECK(by_rule >= 1000);
}

TEST_CASE("docs/operators.md says what was found") { CHECK(read("docs/operators.md") == operators_page(entries())); }

// The list is of PyTorch 2.11's own tables of rules.
TEST_CASE("no operator that PyTorch 2.11 has a rule for is left to replication") {
  // By a mask, which elements are chosen depends on values: then, and only then, it is gathered.
  const std::string by_mask = "aten::index.Tensor";
  std::map<std::string, const Entry*> by_name;
  for (const Entry& entry : entries()) by_name.emplace(entry.overload, &entry);
  std::istringstream lines(read("tests/operators/pytorch_rules.txt"));
  int found = 0;
  for (std::string name; std::getline(lines, name);) {
    const auto it = by_name.find(name);
    if (it == by_name.end()) continue;  // takes no tensor
    ++found;
    CHECK_MESSAGE((it->second->status != Status::kReplicated || name == by_mask),
                  fmt::format("{}: {}", name, it->second->text));
  }
  CHECK(found > 500);
}

// ---- rules that are wrong, or are not there

at::Tensor cumulated(const at::Tensor& x) { return x.cumsum(0); }

TORCH_LIBRARY(tessera_operators_test, m) {
  for (const char* name : {"wrong", "missing", "right"}) m.def(fmt::format("{}(Tensor x) -> Tensor", name).c_str());
}
void register_all(torch::Library& m) {
  for (const char* name : {"wrong", "missing", "right"}) m.impl(name, cumulated);
}
TORCH_LIBRARY_IMPL(tessera_operators_test, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(tessera_operators_test, Meta, m) { register_all(m); }

rules::OpRule of_dims(std::string_view labels) {
  const rules::Labels text(labels);
  return {.strategies = rules::shard_factors({text}, {text})};
}

TEST_CASE("the validator finds a rule that is wrong, and one that is not there") {
  rules::register_rule("tessera_operators_test::wrong", [](const rules::OpCall&) { return of_dims("ab"); });
  rules::register_rule("tessera_operators_test::right", [](const rules::OpCall&) { return of_dims("-b"); });
  const torch::jit::Stack args = {at::rand({5, 3}, at::kDouble)};
  const auto verdict = [&](const char* op) { return validate_layouts(WholeCall({.op = op, .args = args}), 1).verdict; };
  CHECK((verdict("tessera_operators_test::wrong") == Verdict::kWrong));
  CHECK((verdict("tessera_operators_test::missing") == Verdict::kReplicated));
  CHECK((verdict("tessera_operators_test::right") == Verdict::kByRule));
}

}  // namespace
}  // namespace tessera::testing
