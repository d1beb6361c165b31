#include "tessera/ops/rules/search.h"

#include <random>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/ops/rules/made_tensors.h"
#include "tessera/tests/ops/rules/pieces.h"
#include "tessera/tests/ops/rules/samples.h"
#include "tessera/tests/ops/rules/simulate.h"

namespace tessera::testing {
namespace {

using made::x;
using rules::Choice;
using rules::Written;
using Sizes = std::vector<int64_t>;

Choice chosen(const Sample& sample, const std::vector<Placements>& current, const Sizes& mesh, const CostModel& model) {
  const Prepared prepared(sample);
  const auto choice = rules::choose(prepared.rule(), prepared.call().inputs, prepared.outputs(), current, mesh, model);
  REQUIRE(choice.has_value());
  return *choice;
}

CostModel gloo(const Sizes& mesh) { return CostModel::gloo(static_cast<int64_t>(mesh.size())); }

Choice chosen(const Sample& sample, const std::vector<Placements>& current, const Sizes& mesh) {
  return chosen(sample, current, mesh, gloo(mesh));
}

std::string text(const Choice& choice) {
  std::string out;
  for (const Placements& p : choice.inputs) out += to_string(p) + " ";
  out += "->";
  for (const Placements& p : choice.outputs) out += " " + to_string(p);
  return out;
}

TEST_CASE("what needs no communication is chosen") {
  struct Row {
    std::string why;
    Sample sample;
    std::vector<Placements> current;
    std::string want;
  };
  const Sample mm = {"aten::mm", {x({6, 4}), x({4, 8})}};
  const Sample addmm = {"aten::addmm", {x({8}), x({6, 4}), x({4, 8})}};
  const Sample add = {"aten::add.Tensor", {x({6, 4}), x({6, 4})}};
  const Sample plus_one = {"aten::add.Scalar", {x({6, 4}), 1}};
  const Sample gelu = {"aten::gelu", {x({6, 4})}};
  const Sample view = {"aten::view", {x({2, 12}), Sizes{2, 4, 3}}};
  const Sample conv = {"aten::convolution",
                       {x({2, 6, 24}), x({4, 6, 1}), x({4}), Sizes{1}, Sizes{0}, Sizes{1}, false, Sizes{0}, 1}};
  const Sample groups = {"aten::convolution",
                         {x({2, 6, 24}), x({6, 1, 3}), x({6}), Sizes{1}, Sizes{0}, Sizes{1}, false, Sizes{0}, 6}};
  const std::vector<Row> rows = {
      {"rows", mm, {{Shard(0)}, {Replicate()}}, "[S(0)] [R] -> [S(0)]"},
      {"columns", mm, {{Replicate()}, {Shard(1)}}, "[R] [S(1)] -> [S(1)]"},
      {"contraction", mm, {{Shard(1)}, {Shard(0)}}, "[S(1)] [S(0)] -> [P(sum)]"},
      {"a whole operand is sliced for the other's sake", mm, {{Replicate()}, {Shard(0)}}, "[S(1)] [S(0)] -> [P(sum)]"},
      {"nothing sharded stays whole", mm, {{Replicate()}, {Replicate()}}, "[R] [R] -> [R]"},
      {"a pending operand passes", mm, {{Partial()}, {Replicate()}}, "[P(sum)] [R] -> [P(sum)]"},
      {"the bias becomes a term", addmm, {{Replicate()}, {Shard(1)}, {Shard(0)}}, "[P(sum)] [S(1)] [S(0)] -> [P(sum)]"},
      {"columns of the bias too", addmm, {{Shard(0)}, {Replicate()}, {Shard(1)}}, "[S(0)] [R] [S(1)] -> [S(1)]"},
      {"channels that come out", conv, {{Replicate()}, {Shard(0)}, {Shard(0)}}, "[R] [S(0)] [S(0)] -> [S(1)]"},
      {"channels that go in", conv, {{Shard(1)}, {Shard(1)}, {Replicate()}}, "[S(1)] [S(1)] [P(sum)] -> [P(sum)]"},
      {"groups", groups, {{Shard(1)}, {Shard(0)}, {Shard(0)}}, "[S(1)] [S(0)] [S(0)] -> [S(1)]"},
      {"places whose windows stay within pieces",
       conv,
       {{Shard(2)}, {Replicate()}, {Replicate()}},
       "[S(2)] [R] [R] -> [S(2)]"},
      {"terms add up", add, {{Partial()}, {Partial()}}, "[P(sum)] [P(sum)] -> [P(sum)]"},
      {"a whole operand becomes a term", add, {{Partial()}, {Replicate()}}, "[P(sum)] [P(sum)] -> [P(sum)]"},
      {"a number would be added once a term", plus_one, {{Partial()}}, "[S(0)] -> [S(0)]"},
      {"what is not linear reduces first, and scatters", gelu, {{Partial()}}, "[S(0)] -> [S(0)]"},
      {"heads split off", view, {{Shard(1)}}, "[S(1)] -> [S(1)]"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(text(chosen(row.sample, row.current, {2})) == row.want);
  }
}

TEST_CASE("the cheaper of two inputs is communicated") {
  const Sample big_by_small = {"aten::add.Tensor", {x({64, 64}), x({64})}};
  CHECK(text(chosen(big_by_small, {{Shard(1)}, {Replicate()}}, {4})) == "[S(1)] [S(0)] -> [S(1)]");
  CHECK(text(chosen(big_by_small, {{Shard(0)}, {Shard(0)}}, {4})) == "[S(0)] [R] -> [S(0)]");
}

TEST_CASE("where inputs must move, terms that would stay pending count as reduced") {
  const auto conv = [](const Sizes& image) {
    return Sample{"aten::convolution",
                  {x(image), x({8, 8, 3}), x({8}), Sizes{1}, Sizes{1}, Sizes{1}, false, Sizes{0}, 1}};
  };
  const std::vector<Placements> channels = {{Shard(1)}, {Shard(0)}, {Shard(0)}};
  // To cut the kernels anew is cheap, but their terms are as large as the image: the image is gathered, or cut along
  // its batch.
  CHECK(text(chosen(conv({4, 8, 64}), channels, {4})) == "[R] [S(0)] [S(0)] -> [S(1)]");
  CHECK(text(chosen(conv({4, 8, 65536}), channels, {4})) == "[S(0)] [R] [R] -> [S(0)]");
  // As they lie they communicate nothing, and whoever takes the terms reduces them.
  CHECK(text(chosen(conv({4, 8, 65536}), {{Shard(1)}, {Shard(1)}, {Replicate()}}, {4})) ==
        "[S(1)] [S(1)] [P(sum)] -> [P(sum)]");
  // A result that is small beside what else would move stays pending.
  const Sample rows = {"aten::mm", {x({2, 4096}), x({4096, 4096})}};
  CHECK(text(chosen(rows, {{Shard(0)}, {Shard(0)}}, {4})) == "[S(1)] [S(0)] -> [P(sum)]");
}

TEST_CASE("each mesh dimension chooses given those before it") {
  const Sample mm = {"aten::mm", {x({8, 8}), x({8, 8})}};
  CHECK(text(chosen(mm, {{Shard(0), Shard(1)}, {Replicate(), Shard(0)}}, {2, 2})) ==
        "[S(0), S(1)] [R, S(0)] -> [S(0), P(sum)]");
  CHECK(text(chosen(mm, {{Shard(0), Replicate(), Shard(1)}, {Replicate(), Shard(1), Shard(0)}}, {2, 3, 2})) ==
        "[S(0), R, S(1)] [R, S(1), S(0)] -> [S(0), S(1), P(sum)]");
}

TEST_CASE("a view is gathered on the mesh dimension where its chunks part, and there alone") {
  const Sample view = {"aten::view", {x({24}), Sizes{6, 4}}};
  CHECK(text(chosen(view, {{Shard(0)}}, {3})) == "[S(0)] -> [S(0)]");
  CHECK(text(chosen(view, {{Shard(0)}}, {4})) == "[R] -> [R]");
  CHECK(text(chosen(view, {{Shard(0), Shard(0)}}, {2, 2})) == "[S(0), R] -> [S(0), R]");
}

TEST_CASE("the cost model decides between one large move and two small ones") {
  const Sample addcmul{"aten::addcmul", {x({1024, 512}), x({1, 512}), x({1, 512})}};  // 4 MiB beside 4 KiB twice
  const std::vector<Placements> current = {{Shard(0)}, {Shard(1)}, {Shard(1)}};
  CHECK(text(chosen(addcmul, current, {2})) == "[S(0)] [R] [R] -> [S(0)]");
  const CostModel nvlink = {.links = {{.microseconds = 10, .bytes_per_microsecond = 200'000}}};
  CHECK(text(chosen(addcmul, current, {2}, nvlink)) == "[S(1)] [S(1)] [S(1)] -> [S(1)]");
}

TEST_CASE("a written input keeps its placements, or there is no choice") {
  const Prepared add(Sample{"aten::add_.Tensor", {x({6, 4}), x({6, 4})}});
  const Prepared gelu(Sample{"aten::relu_", {x({6, 4})}});
  const std::vector<Written> written = {{.input = 0, .output = 0}};
  const Sizes mesh = {2};
  const auto choose = [&](const Prepared& p, const std::vector<Placements>& current) {
    return rules::choose(p.rule(), p.call().inputs, p.outputs(), current, mesh, gloo(mesh), written);
  };
  CHECK(text(choose(add, {{Replicate()}, {Shard(0)}}).value()) == "[R] [R] -> [R]");
  CHECK(text(choose(add, {{Shard(1)}, {Shard(0)}}).value()) == "[S(1)] [S(1)] -> [S(1)]");
  CHECK(text(choose(add, {{Partial()}, {Replicate()}}).value()) == "[P(sum)] [P(sum)] -> [P(sum)]");
  CHECK_FALSE(choose(gelu, {{Partial()}}).has_value());
}

TEST_CASE("a strategy for another number of tensors, or of a dimension that is not there, is a bug that says so") {
  const std::vector<rules::TensorInfo> one = {{.sizes = {4, 2}}}, two = {one[0], one[0]};
  const auto check = [&](const std::vector<Placement>& inputs, const std::vector<rules::TensorInfo>& given,
                         const Placement& output, const std::string& text) {
    rules::OpRule rule;
    rule.strategies.push_back({.inputs = inputs, .outputs = {output}});
    CHECK_THROWS_WITH_AS(rules::check_strategies(rule, given, one, "mylib::f"),
                         doctest::Contains(("mylib::f: its sharding rule has a strategy " + text).c_str()),
                         std::logic_error);
  };
  check({Replicate()}, two, Replicate(), "of 1 inputs and 1 outputs; the call has 2 and 1");
  rules::OpRule rule;
  rule.strategies.push_back({.inputs = {Replicate()}, .outputs = {Replicate()}});
  const Sizes mesh = {2};
  CHECK_THROWS_WITH_AS(rules::choose(rule, two, one, {{Replicate()}, {Replicate()}}, mesh, gloo(mesh)),
                       doctest::Contains("a strategy of 1 inputs and 1 outputs; the call has 2 and 1"),
                       std::logic_error);
  check({Replicate(), Shard(2)}, two, Replicate(), "with S(2) for input 1, which has 2 dimensions");
  check({Shard(1)}, one, Shard(2), "with S(2) for output 0, which has 2 dimensions");
}

TEST_CASE("a strategy that names a partition of its own does not stand for others") {
  rules::OpRule rule;
  const Placement zigzag = BlockCyclic(0, 1);
  rule.strategies.push_back({.inputs = {zigzag}, .outputs = {zigzag}, .kernel = "of zigzag"});
  const std::vector<rules::TensorInfo> one = {{.sizes = {8}}};
  const Sizes mesh = {2};
  for (const Placement& given : {Placement(Shard(0)), BlockCyclic(0, 2)}) {
    const auto choice = rules::choose(rule, one, one, {{given}}, mesh, gloo(mesh)).value();
    CHECK(choice.inputs[0] == Placements{zigzag});
    CHECK(choice.kernel == "of zigzag");
  }
}

// ---- every sample on meshes of two and three dimensions, from random layouts

Placement draw(const at::Tensor& t, std::mt19937& random) {
  const auto pick = static_cast<int64_t>(random() % static_cast<unsigned>(t.dim() + 2));
  if (pick < t.dim()) return Shard(pick);
  return pick == t.dim() || !can_be_partial(t.scalar_type(), ReduceOp::kSum) ? Replicate() : Partial();
}

struct Drawn {
  int64_t calls = 0, simulated = 0, in_place = 0;  // the last are those of `simulated` that write their input
};

void check_drawn(const Sample& sample, const Sizes& mesh, std::mt19937& random, Drawn& counts) {
  const Prepared prepared(sample);
  std::vector<Placements> current;
  for (const at::Tensor& t : prepared.tensors()) {
    current.emplace_back();
    for (std::size_t i = 0; i < mesh.size(); ++i) current.back().push_back(t.defined() ? draw(t, random) : Replicate());
  }
  std::vector<Written> written;
  if (prepared.in_place()) written.push_back({.input = 0, .output = 0});
  const auto choice =
      rules::choose(prepared.rule(), prepared.call().inputs, prepared.outputs(), current, mesh, gloo(mesh), written);
  CAPTURE(sample.op);
  ++counts.calls;
  if (!choice) {  // what is written cannot stay where it is
    CHECK(prepared.in_place());
    return;
  }
  ++counts.simulated;
  if (prepared.in_place()) ++counts.in_place;
  CAPTURE(text(*choice));
  const std::string wrong = simulate(prepared, {choice->inputs, choice->outputs, choice->kernel}, mesh);
  CHECK_MESSAGE(wrong.empty(), wrong);
}

TEST_CASE("what is chosen from any layouts on meshes of two and three dimensions gives the whole's result") {
  at::manual_seed(3);
  std::mt19937 random(3);
  Drawn counts;
  for (const auto& samples :
       {view_samples(), reduction_samples(), matmul_samples(), nn_samples(), factory_samples(), pointwise_samples()}) {
    for (const Sample& sample : samples) {
      for (const Sizes& mesh : {Sizes{2, 2}, Sizes{3, 2}, Sizes{2, 2, 2}}) {
        for (int i = 0; i < 3; ++i) check_drawn(sample, mesh, random, counts);
      }
    }
  }
  CHECK(counts.simulated > counts.calls / 2);
  CHECK(counts.in_place > 0);
}

TEST_CASE("rows of other ranks are fetched where that is cheaper than to gather or to cut otherwise") {
  const auto rows = [](const std::vector<Placements>& current, const Sizes& image, int64_t kernel,
                       const Sizes& stride) {
    const Sample conv = {"aten::convolution",
                         {x(image), x({1, 1, kernel}), x({1}), stride, Sizes{0}, Sizes{1}, false, Sizes{0}, 1}};
    return text(chosen(conv, current, {4}));
  };
  const Placements whole = {Replicate()};
  CHECK(rows({{Shard(2)}, whole, whole}, {4, 1, 4096}, 3, {1}) == "[S(2)] [R] [R] -> [S(2)]");
  CHECK(rows({{RaggedShard(2, {9, 0, 2, 1})}, whole, whole}, {4, 1, 12}, 3, {2}) ==
        "[RS(2,9,0,2,1)] [R] [R] -> [RS(2,4,0,1,0)]");
  // Every rank would need almost all rows.
  CHECK(rows({{Shard(2)}, whole, whole}, {4, 1, 4096}, 4000, {1}) == "[S(0)] [R] [R] -> [S(0)]");
}

}  // namespace
}  // namespace tessera::testing
