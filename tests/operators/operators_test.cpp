// Checks every operator and its gradient against docs/operators.md, and checks the validators themselves on rules that
// are wrong. Each of Bazel's shards calls a part of the operators, and one in N of its part with
// TESSERA_OPERATORS_ONE_IN=N.

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "tessera/ops/rules/rule.h"
#include "tessera/tests/operators/calls.h"
#include "tessera/tests/operators/gradients.h"
#include "tessera/tests/operators/survey.h"
#include "tessera/tests/operators/validate.h"

namespace tessera::testing {
namespace {

std::string read(const std::string& path) {
  std::ifstream in(path);
  REQUIRE_MESSAGE(in.good(), path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::size_t number_in(const char* variable, std::size_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::stoul(text);
}

// Returns the entries of this shard, found by calling the operators.
const std::vector<Entry>& found() {
  static const auto all = [] {
    if (const char* const file = std::getenv("TEST_SHARD_STATUS_FILE")) std::ofstream(file) << "";
    const std::size_t step = number_in("TEST_TOTAL_SHARDS", 1) * number_in("TESSERA_OPERATORS_ONE_IN", 1);
    const std::vector<std::string> overloads = tensor_overloads();
    std::vector<Entry> out;
    for (std::size_t i = number_in("TEST_SHARD_INDEX", 0); i < overloads.size(); i += step)
      out.push_back(survey(overloads[i]));
    return out;
  }();
  return all;
}

// Returns all entries, as the page has them.
const std::vector<Entry>& written() {
  static const auto all = entries_of(read("docs/operators.md"));
  return all;
}

std::size_t count(const std::function<bool(const Entry&)>& holds) {
  return static_cast<std::size_t>(std::count_if(written().begin(), written().end(), holds));
}

std::map<std::string, const Entry*> by_name(const std::vector<Entry>& entries) {
  std::map<std::string, const Entry*> out;
  for (const Entry& entry : entries) out.emplace(entry.overload, &entry);
  return out;
}

TEST_CASE("no operator is wrong, nor its gradient") {
  for (const Entry& entry : found()) {
    CHECK_MESSAGE(entry.status != Status::kWrong, fmt::format("{}: {}", entry.overload, entry.text));
    CHECK_MESSAGE(entry.gradient != Gradient::kWrong, fmt::format("{}: {}", entry.overload, entry.gradient_text));
  }
}

TEST_CASE("docs/operators.md says what was found") {
  const auto pages = by_name(written());
  for (const Entry& entry : found()) {
    const auto at = pages.find(entry.overload);
    REQUIRE_MESSAGE(at != pages.end(), entry.overload);
    CHECK(line_of(*at->second) == line_of(entry));
  }
}

TEST_CASE("docs/operators.md has every overload once, and its sums are right") {
  std::vector<std::string> names;
  for (const Entry& entry : written()) names.push_back(entry.overload);
  std::sort(names.begin(), names.end());
  CHECK(names == tensor_overloads());
  CHECK(operators_page(written()) == read("docs/operators.md"));
}

TEST_CASE("2,400 overloads are called, 2,000 are right by rule, 1,100 have gradients that are right") {
  const std::size_t called = count([](const Entry& e) { return e.status < Status::kNotCalled; });
  const std::size_t by_rule = count([](const Entry& e) { return e.status == Status::kByRule; });
  const std::size_t gradients = count([](const Entry& e) { return e.gradient == Gradient::kRight; });
  MESSAGE(fmt::format("{} called, {} right by rule, {} gradients right", called, by_rule, gradients));
  CHECK(called >= 2400);
  CHECK(by_rule >= 2000);
  CHECK(gradients >= 1100);
}

TEST_CASE("at most 60 overloads are not called, each for a reason") {
  CHECK(count([](const Entry& e) { return e.status == Status::kNotCalled; }) <= 60);
  for (const Entry& entry : written()) {
    if (entry.status == Status::kNotCalled) CHECK_MESSAGE(!entry.text.empty(), entry.overload);
  }
}

// The list is taken from PyTorch 2.11's own tables of rules.
TEST_CASE("every operator that PyTorch 2.11 has a rule for is right by rule") {
  const std::map<std::string, std::string> exceptions = {
      {"aten::index.Tensor",
       "by a mask, which elements are chosen depends on values: then, and only then, it is gathered"},
      {"aten::squeeze_.dim", "where a dimension of size 1 is cut, the tensor itself would have to move; refused"},
      {"aten::_fused_rms_norm_backward", "LibTorch has no kernel of it for CPU tensors; not called"},
      {"aten::randint_like.low_dtype_out", "with out=, its own kernel draws, replicated"},
  };
  const auto pages = by_name(written());
  std::istringstream lines(read("tests/operators/pytorch_rules.txt"));
  int known = 0;
  for (std::string name; std::getline(lines, name);) {
    const auto at = pages.find(name);
    if (at == pages.end()) continue;                          // it takes no tensor
    if (at->second->status == Status::kOutOfScope) continue;  // it is for a GPU
    ++known;
    const bool right = at->second->status == Status::kByRule;
    CHECK_MESSAGE((right || exceptions.contains(name)),
                  fmt::format("{} is {}: {}", name, to_string(at->second->status), at->second->text));
    CHECK_MESSAGE((!right || !exceptions.contains(name)), fmt::format("{} is no exception any more", name));
  }
  CHECK(known > 500);
}

// ---- rules that are wrong or missing

at::Tensor cumulated(const at::Tensor& x) { return x.cumsum(0); }

// The gradient of this operator is right if the rule of the operator that its backward calls is right.
struct Through : torch::autograd::Function<Through> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const std::string& op) {
    context->saved_data["op"] = op;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const std::string name = "tessera_operators_test::" + context->saved_data["op"].toStringRef();
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    return {op.typed<at::Tensor(const at::Tensor&)>().call(grads[0]), at::Tensor()};
  }
};

TORCH_LIBRARY(tessera_operators_test, m) {
  for (const char* name : {"wrong", "missing", "right"}) m.def(fmt::format("{}(Tensor x) -> Tensor", name).c_str());
  m.def("wrong_gradient(Tensor x) -> Tensor", [](const at::Tensor& x) { return Through::apply(x, "wrong"); });
  m.def("right_gradient(Tensor x) -> Tensor", [](const at::Tensor& x) { return Through::apply(x, "right"); });
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

void register_rules() {
  rules::register_rule("tessera_operators_test::wrong", [](const rules::OpCall&) { return of_dims("ab"); });
  rules::register_rule("tessera_operators_test::right", [](const rules::OpCall&) { return of_dims("-b"); });
}

TEST_CASE("the validator finds a rule that is wrong, and one that is not there") {
  register_rules();
  const torch::jit::Stack args = {at::rand({5, 3}, at::kDouble)};
  const auto verdict = [&](const char* op) { return validate_layouts(WholeCall({.op = op, .args = args}), 1).verdict; };
  CHECK((verdict("tessera_operators_test::wrong") == Verdict::kWrong));
  CHECK((verdict("tessera_operators_test::missing") == Verdict::kReplicated));
  CHECK((verdict("tessera_operators_test::right") == Verdict::kByRule));
}

TEST_CASE("the validator of gradients finds a step of backward that is wrong where forward is right") {
  register_rules();
  for (const std::string kind : {"wrong", "right"}) {
    const WholeCall call(
        {.op = "tessera_operators_test::" + kind + "_gradient", .args = {at::rand({5, 3}, at::kDouble)}});
    CHECK((validate_layouts(call, 1).verdict == Verdict::kByRule));
    Gradients gradients(call, 1);
    REQUIRE(gradients.differentiable());
    CHECK((gradients.validate().verdict == (kind == "wrong" ? Verdict::kWrong : Verdict::kByRule)));
  }
}

TEST_CASE("what is drawn is compared: other numbers on other meshes are wrong") {
  const auto drawn = [](const char* op) {
    return validate_layouts(WholeCall({.op = op, .args = {at::rand({5, 3}, at::kDouble)}, .random = true}), 1).verdict;
  };
  CHECK((drawn("aten::rand_like") == Verdict::kByRule));
  register_rules();
  CHECK((drawn("tessera_operators_test::wrong") == Verdict::kWrong));
}

}  // namespace
}  // namespace tessera::testing
