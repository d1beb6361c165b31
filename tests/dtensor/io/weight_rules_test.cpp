#include "tessera/dtensor/io/weight_rules.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/io/name_pattern.h"
#include "tessera/dtensor/io/weight_plan.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/tests/dtensor/io/save_list.h"
#include "tessera/tests/dtensor/io/test_files.h"

namespace tessera {
namespace {

TEST_CASE("weight rules: what wildcards stand for") {
  using Captured = std::vector<std::string>;
  CHECK(captures("layers.*.w?", "layers.10.wq") == Captured{"10", "q"});
  CHECK(captures("*.*", "a.b.c") == Captured{"a", "b.c"});  // the first * is as short as it can be
  CHECK(captures("*x", "axbx") == Captured{"axb"});
  CHECK(captures("a", "a") == Captured{});
  CHECK(captures("*", "") == Captured{""});
  CHECK(captures("*?x*", "abxcxd") == Captured{"a", "b", "cxd"});
  CHECK(captures("*.*.?", "a.b.c.d") == Captured{"a", "b.c", "d"});
  CHECK_FALSE(captures("?", "").has_value());
  for (const char* const name : {"layers.10.w", "layers.10.wqs", "layer.10.wq"}) {
    CHECK_FALSE(captures("layers.*.w?", name).has_value());
  }
  CHECK(filled("h.*.?_proj", {"10", "q", "more"}) == "h.10.q_proj");
  CHECK(wildcards("h.*.?_proj") == 2);
}

TEST_CASE("weight rules: a long name of a hostile file is matched in time in proportion to its length") {
  const std::string name(std::size_t{1} << 22, 'a');
  CHECK(matches("*a*a*a", name));
  CHECK_FALSE(matches("*a*a*b", name));
  CHECK(captures("a*a", name)->front().size() == name.size() - 2);
}

TEST_CASE("weight rules: a source is a value whose text is the C++ that makes it") {
  const WeightSource third = from_file("h.*.c_attn.weight").split(1, 0, 3).transpose(0, 1);
  CHECK(to_string(third) == R"(from_file("h.*.c_attn.weight").split(1, 0, 3).transpose(0, 1))");
  const WeightSource fused =
      fuse(0, {from_file("a").narrow(0, 1, 2), from_file("b.?").unflatten(-1, {2, -1}).flatten(0, 1)}).transpose(0, 1);
  CHECK(to_string(fused) ==
        R"(fuse(0, {from_file("a").narrow(0, 1, 2), from_file("b.?").unflatten(-1, {2, -1}).flatten(0, 1)}))"
        ".transpose(0, 1)");
  CHECK(fused.file_names() == std::vector<std::string>{"a", "b.?"});
  CHECK(to_string(fused.filled({"c"})).find("b.c") != std::string::npos);
  CHECK(third == from_file("h.*.c_attn.weight").split(1, 0, 3).transpose(0, 1));
  CHECK_FALSE(third == from_file("h.*.c_attn.weight").split(1, 1, 3).transpose(0, 1));
  const WeightRules rules = {.rules = {{"layers.*.wq", third}}, .ignored = {"mask", "*.bias"}};
  CHECK(to_string(rules) == "\"layers.*.wq\" <- " + to_string(third) + "\nignored: mask, *.bias\n");
  CHECK_THROWS_WITH_AS(fuse(0, {}), doctest::Contains("fuse: there is nothing to join"), std::invalid_argument);
}

// Is a tensor of a file, and what LibTorch makes of it.
struct Described {
  const char* why;
  WeightSource source;
  at::Tensor want;
};

std::map<std::string, at::Tensor> make_tensors_of_file() {
  const auto numbered = [](at::IntArrayRef shape, int64_t first) {
    return torch::arange(first, first + c10::multiply_integers(shape), torch::kLong).view(shape);
  };
  return {{"a", numbered({6, 4}, 0)},         {"b", numbered({6, 4}, 100)}, {"c", numbered({3, 4}, 200)},
          {"d", numbered({2, 1, 3, 4}, 300)}, {"e", numbered({8, 3}, 400)}, {"s", numbered({}, 500)},
          {"v", numbered({12}, 600)},         {"n", numbered({0, 4}, 700)}};
}

const std::map<std::string, at::Tensor>& tensors_of_file() {
  static const auto tensors = make_tensors_of_file();
  return tensors;
}

std::vector<Described> described() {
  const auto& t = tensors_of_file();
  const at::Tensor &a = t.at("a"), &b = t.at("b"), &c = t.at("c"), &d = t.at("d"), &e = t.at("e"), &v = t.at("v");
  const auto file = [](const char* name) { return from_file(name); };
  return {
      {"as it is", file("a"), a},
      {"a scalar", file("s"), t.at("s")},
      {"without elements", file("n").transpose(0, 1), t.at("n").t()},
      {"transposed", file("a").transpose(0, -1), a.t()},
      {"a third of the columns, transposed", file("v").unflatten(0, {2, 6}).split(1, 1, 3).transpose(0, 1),
       v.view({2, 6}).narrow(1, 2, 2).t()},
      {"some rows", file("a").narrow(0, 1, 3), a.narrow(0, 1, 3)},
      {"no rows", file("a").narrow(0, 6, 0), a.narrow(0, 6, 0)},
      {"fused rows", fuse(0, {file("a"), file("c"), file("b")}), at::cat({a, c, b})},
      {"fused columns", fuse(-1, {file("a"), file("b").narrow(1, 1, 2)}), at::cat({a, b.narrow(1, 1, 2)}, 1)},
      {"fused, then transposed and split", fuse(0, {file("a"), file("b")}).transpose(0, 1).split(1, 1, 4),
       at::cat({a, b}).t().narrow(1, 3, 3)},
      {"one tensor twice", fuse(0, {file("c"), file("c").transpose(0, 1).transpose(1, 0)}), at::cat({c, c})},
      {"rotary order", file("e").unflatten(0, {2, 2, -1}).transpose(1, 2).flatten(0, 2),
       e.view({2, 2, 2, 3}).transpose(1, 2).reshape({8, 3})},
      {"rotary order and back",
       file("e")
           .unflatten(0, {2, 2, -1})
           .transpose(1, 2)
           .flatten(0, 2)
           .unflatten(0, {2, -1, 2})
           .transpose(1, 2)
           .flatten(0, 2),
       e},
      {"fused by heads", fuse(1, {file("a").unflatten(0, {3, 2}), file("c").unflatten(0, {3, 1})}).flatten(0, 1),
       at::cat({a.view({3, 2, 4}), c.view({3, 1, 4})}, 1).flatten(0, 1)},
      {"a part of what was fused by heads",
       fuse(1, {file("a").unflatten(0, {3, 2}), file("c").unflatten(0, {3, 1})}).flatten(0, 1).narrow(0, 1, 6),
       at::cat({a.view({3, 2, 4}), c.view({3, 1, 4})}, 1).flatten(0, 1).narrow(0, 1, 6)},
      {"dimensions of one element", file("d").flatten(0, 1).transpose(1, 2), d.flatten(0, 1).transpose(1, 2)},
      {"unflattened into ones", file("a").unflatten(0, {1, 2, 1, 3}), a.view({1, 2, 1, 3, 4})},
      {"unflattened after fusing", fuse(0, {file("a"), file("b")}).unflatten(0, {2, 2, 3}).transpose(0, 2),
       at::cat({a, b}).view({2, 2, 3, 4}).transpose(0, 2)},
      {"unflattened across parts", fuse(0, {file("c"), file("a")}).unflatten(0, {3, -1}),
       at::cat({c, a}).view({3, 3, 4})},
      {"unflattened within parts", fuse(0, {file("a"), file("c"), file("c")}).unflatten(0, {3, 4}),
       at::cat({a, c, c}).view({3, 4, 4})},
      {"flattened, then cut elsewhere", file("a").flatten(0, 1).unflatten(0, {4, 6}).transpose(0, 1),
       a.view({4, 6}).t()},
      {"all dimensions in one", file("d").transpose(0, 3).flatten(0, 3), d.transpose(0, 3).reshape({-1})},
  };
}

// Calls `visit` with every box of a tensor of `shape`.
template <class Visit>
void each_box(const std::vector<int64_t>& shape, const Visit& visit, TensorBox box = {}) {
  const std::size_t d = box.sizes.size();
  if (d == shape.size()) return visit(box);
  box.offsets.push_back(0);
  box.sizes.push_back(0);
  for (int64_t begin = 0; begin <= shape[d]; ++begin) {
    for (int64_t end = begin; end <= shape[d]; ++end) {
      box.offsets[d] = begin;
      box.sizes[d] = end - begin;
      each_box(shape, visit, box);
    }
  }
}

// Reads the planned part from the tensors of the file, and counts the elements that it takes.
at::Tensor read(const WeightPlan& plan, int64_t& taken) {
  const auto& tensors = tensors_of_file();
  const at::Tensor out = torch::full(plan.shape, -1, torch::kLong);
  for (const WeightBlock& block : plan.blocks) {
    std::vector<at::Tensor> runs;
    const ElementRuns lies = runs_of(block);
    CHECK(std::is_sorted(lies.starts.begin(), lies.starts.end()));
    for (const int64_t start : lies.starts) {
      runs.push_back(tensors.at(block.file_name).flatten().narrow(0, start, lies.length));
      taken += lies.length;
    }
    at::Tensor part = out;
    for (std::size_t d = 0; d < plan.shape.size(); ++d) {
      part = part.narrow(static_cast<int64_t>(d), block.box.offsets[d], block.box.sizes[d]);
    }
    part.copy_(arranged(block, at::cat(runs)));
  }
  return out;
}

TEST_CASE("weight plans: every box of every source has LibTorch's elements, each read once") {
  const auto& tensors = tensors_of_file();
  const ShapeOf shape_of = [&, shapes = std::map<std::string, std::vector<int64_t>>()](
                               const std::string& name) mutable -> const std::vector<int64_t>& {
    return shapes.try_emplace(name, tensors.at(name).sizes().vec()).first->second;
  };
  int64_t boxes = 0;
  for (const Described& row : described()) {
    CAPTURE(row.why);
    const WeightPlan plan = plan_weight(row.source, shape_of);
    REQUIRE(plan.shape == row.want.sizes().vec());
    bool equal = true, once = true;
    each_box(plan.shape, [&](const TensorBox& box) {
      at::Tensor want = row.want;
      for (std::size_t d = 0; d < box.sizes.size(); ++d) {
        want = want.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
      }
      int64_t taken = 0;
      equal = equal && read(part_of_plan(plan, box), taken).equal(want);
      once = once && taken == want.numel();
      ++boxes;
    });
    CHECK(equal);
    CHECK(once);
  }
  CHECK(boxes > 5000);
}

TEST_CASE("weight plans: rows in rotary order are read as runs of whole rows, all of them as one") {
  const WeightSource source = from_file("w").unflatten(0, {4, 2, -1}).transpose(1, 2).flatten(0, 2);
  const std::vector<int64_t> shape = {32, 10};
  const WeightPlan plan = plan_weight(source, [&](const std::string&) -> const std::vector<int64_t>& { return shape; });
  REQUIRE(plan.blocks.size() == 1);
  CHECK(runs_of(plan.blocks[0]).starts == std::vector<int64_t>{0});
  const WeightPlan half_head = part_of_plan(plan, {{8, 0}, {4, 10}});  // rows 8, 12, 9, 13 of the file
  REQUIRE(half_head.blocks.size() == 1);
  CHECK(runs_of(half_head.blocks[0]).starts == std::vector<int64_t>{80, 120});
  CHECK(runs_of(half_head.blocks[0]).length == 20);
}

TEST_CASE("weight plans: a step that does not fit says what it met") {
  const auto& tensors = tensors_of_file();
  std::vector<int64_t> shape;
  const ShapeOf shape_of = [&](const std::string& name) -> const std::vector<int64_t>& {
    return shape = tensors.at(name).sizes().vec();
  };
  const std::vector<std::pair<WeightSource, const char*>> rows = {
      {from_file("a").transpose(0, 2), "there is no dimension 2 of shape [6, 4]"},
      {from_file("a").split(1, 0, 3), "there is no part 0 of 3 equal parts along dimension 1 of shape [6, 4]"},
      {from_file("a").split(1, 2, 2), "there is no part 2 of 2 equal parts along dimension 1 of shape [6, 4]"},
      {from_file("a").narrow(0, 4, 3), "elements [4, 7) are not within dimension 0 of shape [6, 4]"},
      {from_file("a").narrow(0, 1, int64_t{1} << 62), "are not within dimension 0"},
      {from_file("a").unflatten(0, {4, -1}), "sizes {4, -1} do not multiply to dimension 0 of shape [6, 4]"},
      {from_file("a").unflatten(0, {-1, -1}), "sizes {-1, -1} do not multiply to dimension 0 of shape [6, 4]"},
      {from_file("a").flatten(1, 0), "dimension 1 is after 0 of shape [6, 4]"},
      {fuse(1, {from_file("a"), from_file("c")}),
       "part 1 of shape [3, 4] cannot follow parts along dimension 1 of shape [6, 4]"},
      {from_file("a").transpose(0, 1).flatten(0, 1).unflatten(0, {3, 8}), "cut across dimensions that were flattened"},
  };
  for (const auto& row : rows) {
    CHECK_THROWS_WITH_AS(plan_weight(row.first, shape_of), doctest::Contains(row.second), std::invalid_argument);
  }
}

// Has a projection that its file holds in two.
struct Fused : torch::nn::Module {
  Fused() {
    register_parameter("both", torch::zeros({4, 3}));
    register_parameter("other", torch::zeros({3, 2}));
  }
};

TEST_CASE("weights: rules that do not fit are listed in one message, and nothing changes") {
  const TempFolder folder;
  const std::string path = folder / "m.safetensors";
  save_tensors({{"x", torch::ones({2, 3})}, {"y", torch::ones({2, 3})}, {"z", torch::ones({2, 3})}}, {}, path, 0, {},
               "test");
  const WeightRule both = {"both", fuse(0, {from_file("x"), from_file("y")})};
  const WeightRule other = {"other", from_file("z").transpose(0, 1)};
  struct Row {
    const char* why;
    LoadOptions options;
    std::vector<const char*> want;
  };
  const std::vector<Row> rows = {
      {"no rule", {.rules = {{both}, {"z"}}}, {"No rule is for: 'other' (add one,"}},
      {"an idle rule",
       {.rules = {{both, other, {"head.*", from_file("x.*")}}, {}}},
       {"No tensor of the module has the name of these rules: \"head.*\" <- from_file(\"x.*\")."}},
      {"a missing tensor",
       {.rules = {{{"both", fuse(0, {from_file("x"), from_file("q")})}, other}, {}}},
       {"Missing in the file: 'q' for 'both' (rename", "Not in the module: 'y' (set"}},
      {"another shape",
       {.rules = {{both, {"other", from_file("z")}}, {}}},
       {"Of another shape: 'other' is [2, 3] by the rule \"other\" <- from_file(\"z\") and [3, 2] in the module."}},
      {"a step that does not fit",
       {.rules = {{both, {"other", from_file("z").split(0, 0, 4)}}, {}}},
       {"'other' is [3, 2] in the module, and by the rule \"other\" <- from_file(\"z\").split(0, 0, 4) it cannot be "
        "made: there is no part 0 of 4 equal parts along dimension 0 of shape [2, 3]"}},
      {"a part that no rule takes",
       {.rules = {{{"both", fuse(0, {from_file("x"), from_file("y"), from_file("z")}).narrow(0, 1, 4)}}, {}},
        .allow_missing = {"other"}},
       {"Not in the module: 3 of the 6 elements of 'x', 3 of the 6 elements of 'z' (set `allow_unexpected`"}},
      {"a part that is taken twice in the place of another, in two ways",
       {.rules = {{{"both",
                    fuse(0, {from_file("x").narrow(0, 0, 1),
                             from_file("x").flatten(0, 1).narrow(0, 0, 3).unflatten(0, {1, 3}), from_file("y")})},
                   other},
                  {}}},
       {"Not in the module: 3 of the 6 elements of 'x' (set `allow_unexpected`"}},
      {"too many wildcards",
       {.rules = {{both, {"o*r", from_file("?*")}}, {}}},
       {"rule \"o*r\" <- from_file(\"?*\"): '?*' has more wildcards than the module's name"}},
      {"both ways",
       {.rename = [](const std::string& name) { return name; }, .rules = {{both, other}, {}}},
       {"`rename` and `rules` are given"}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    Fused module;
    const std::string text = message_of([&] { load_weights(module, path, row.options); });
    CAPTURE(text);
    for (const char* const want : row.want) CHECK(text.find(want) != std::string::npos);
    for (const at::Tensor& parameter : module.parameters()) CHECK(parameter.count_nonzero().item<int64_t>() == 0);
  }
  Fused module;
  load_weights(module, path, {.rules = {{both, other}, {}}});
  for (const at::Tensor& parameter : module.parameters()) CHECK(parameter.eq(1).all().item<bool>());
}

TEST_CASE("weights: of several rules for one tensor the first counts whose tensors the file has") {
  const TempFolder folder;
  const std::string path = folder / "m.safetensors";
  struct One : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", at::zeros({2}));
  } module;
  const WeightRules rules = {.rules = {{"w*", from_file("own")}, {"weight", from_file("shared")}},
                             .ignored = {"mask*"}};
  save_tensors({{"shared", torch::full({2}, 5.0)}, {"mask.1", torch::ones({1})}}, {}, path, 0, {}, "test");
  load_weights(module, path, {.rules = rules});
  CHECK(module.weight.equal(torch::full({2}, 5.0)));
  save_tensors({{"shared", torch::full({2}, 5.0)}, {"own", torch::full({2}, 6.0)}}, {}, path, 0, {}, "test");
  load_weights(module, path, {.rules = rules});
  CHECK(module.weight.equal(torch::full({2}, 6.0)));
}

TEST_CASE("weights: parts of several dtypes are converted each on its own") {
  const TempFolder folder;
  const std::string path = folder / "m.safetensors";
  struct One : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", at::zeros({4}));
  } module;
  const at::Tensor exact = torch::tensor({1.0 / 3, 2.0 / 3}, torch::kDouble);
  save_tensors({{"d", exact}, {"h", exact.to(torch::kBFloat16)}}, {}, path, 0, {}, "test");
  const WeightRules rules = {.rules = {{"weight", fuse(0, {from_file("d"), from_file("h")})}}, .ignored = {}};
  CHECK(message_of([&] {
          load_weights(module, path, {.rules = rules});
        }).find("Of another dtype: 'weight' is Double in the file and Float in the module") != std::string::npos);
  load_weights(module, path, {.rules = rules, .convert_dtype = true});
  CHECK(module.weight.equal(torch::cat({exact.to(torch::kFloat), exact.to(torch::kBFloat16).to(torch::kFloat)})));
}

}  // namespace
}  // namespace tessera
