#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/styles/hooks.h"
#include "tessera/styles/module_tree.h"
#include "tessera/styles/parallel_styles.h"
#include "tessera/styles/prepare_styles.h"

namespace {

using tessera::ModuleKind;
using tessera::ModuleTree;

struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    for (const char* name : {"wq", "wk", "wv", "wo", "w"}) register_module(name, torch::nn::Linear(4, 4));
  }
};
TORCH_MODULE(Attention);

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    register_module("attn", Attention());
    register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  }
};
TORCH_MODULE(Layer);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    register_module("tok", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4)));
    register_module("bag", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).max_norm(1)));
    torch::nn::ModuleList layers;
    for (int i = 0; i < 11; ++i) layers->push_back(Layer());
    register_module("layers", layers);
    const torch::nn::Linear shared(4, 8);
    register_module("head", shared);
    register_module("tail", shared);
  }
};
TORCH_MODULE(Model);

// Has names that fnmatch would take for patterns, and names that those would match.
struct OddNamesImpl : torch::nn::Module {
  OddNamesImpl() {
    for (const char* name : {"fc[1]", "fc1", "a*", "ab", "q?", "qq", "b\\*", "b*", "[!x]", "y", "end]"}) {
      register_module(name, torch::nn::Linear(2, 2));
    }
    register_module("in[0]", Attention());
    register_module("in0", Attention());
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TESSERA_MODULE(OddNames);

std::vector<std::string> paths(const ModuleTree& tree, const std::string& pattern) {
  std::vector<std::string> found;
  for (const std::size_t index : match(tree, pattern)) found.push_back(tree[index].path);
  return found;
}

}  // namespace

TEST_CASE("a pattern matches direct children, part by part, with fnmatch") {
  Model model;
  const ModuleTree tree = tessera::tree_of(*model);
  struct Row {
    const char* why;
    const char* pattern;
    std::vector<std::string> want;
  };
  const std::vector<Row> rows = {
      {"the empty pattern is the root", "", {""}},
      {"a name", "tok", {"tok"}},
      {"a path", "layers.3.attn.wq", {"layers.3.attn.wq"}},
      {"? is one character, not none",
       "layers.0.attn.w?",
       {"layers.0.attn.wq", "layers.0.attn.wk", "layers.0.attn.wv", "layers.0.attn.wo"}},
      {"* is any number",
       "layers.0.attn.w*",
       {"layers.0.attn.wq", "layers.0.attn.wk", "layers.0.attn.wv", "layers.0.attn.wo", "layers.0.attn.w"}},
      {"a set", "layers.0.attn.w[qk]", {"layers.0.attn.wq", "layers.0.attn.wk"}},
      {"not in a set", "layers.0.norm[!1]", {"layers.0.norm2"}},
      {"two digits", "layers.??.norm1", {"layers.10.norm1"}},
      {"* in the middle", "layers.1*.norm1", {"layers.1.norm1", "layers.10.norm1"}},
      {"* does not cross a dot", "*.wq", {}},
      {"nor does it go down", "layers.*.wq", {}},
      {"all children", "*", {"tok", "bag", "layers", "head", "tail"}},
      {"a name that is not there", "lay", {}},
      {"a parameter is no module", "tok.weight", {}},
      {"an empty part", "layers..attn", {}},
      {"a dot at the end", "layers.", {}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CAPTURE(row.pattern);
    CHECK(paths(tree, row.pattern) == row.want);
  }
  CHECK(paths(tree, "layers.*.attn.w?").size() == 44);
}

TEST_CASE("the pattern of a path matches that path alone, whatever characters its names have") {
  OddNames model;
  const ModuleTree tree = tessera::tree_of(*model);
  for (const tessera::ModuleNode& node : tree) {
    CAPTURE(node.path);
    CHECK(paths(tree, tessera::pattern_of(node.path)) == std::vector<std::string>{node.path});
  }
  CHECK(tessera::pattern_of("layers.0.in[0].w?") == "layers.0.in\\[0\\].w\\?");
  CHECK(paths(tree, "fc[1]") == std::vector<std::string>{"fc1"});
}

TEST_CASE("the tree knows a TESSERA_MODULE by the class that the user wrote") {
  OddNames model;
  CHECK(tessera::tree_of(*model)[0].type == "(anonymous namespace)::OddNamesImpl");
}

TEST_CASE("the tree knows each module's type, kind and own tensors") {
  Model model;
  const ModuleTree tree = tessera::tree_of(*model);
  CHECK(tree[0].path.empty());
  CHECK(tree[0].tensors.empty());
  const auto& embedding = tree[match(tree, "tok").at(0)];
  CHECK(embedding.kind == ModuleKind::kEmbedding);
  CHECK_FALSE(embedding.renormalizes);
  CHECK(tree[match(tree, "bag").at(0)].renormalizes);
  const auto& head = tree[match(tree, "head").at(0)];
  CHECK(head.kind == ModuleKind::kLinear);
  CHECK(head.type == "torch::nn::LinearImpl");
  REQUIRE(head.tensors.size() == 2);
  CHECK(head.tensors[0].name == "weight");
  CHECK(head.tensors[1].name == "bias");
  CHECK(tree[match(tree, "tail").at(0)].module == head.module);
  CHECK(tree[match(tree, "layers.0.norm1").at(0)].kind == ModuleKind::kOther);
}

TEST_CASE("a plan prints as it is written") {
  using namespace tessera;
  const ParallelPlan plan = {
      {"", PrepareModuleInput(
               {.input_layouts = {Shard(0), std::nullopt}, .desired_input_layouts = {Replicate(), std::nullopt}})},
      {"layers.*.attn.w?", ColwiseParallel()},
      {"layers.*.attn.wo", RowwiseParallel({.output_layouts = Shard(1), .use_local_output = true})},
      {"layers.*.norm?", SequenceParallel()},
      {"tok", RowwiseParallel({.input_layouts = Replicate(), .desired_input_layouts = Replicate()})},
      {"head", PrepareModuleOutput(
                   {.output_layouts = {Shard(-1)}, .desired_output_layouts = {Replicate()}, .use_local_output = true})},
  };
  CHECK(to_string(plan) ==
        "\"\"                PrepareModuleInput([S(0), -] -> [R, -])\n"
        "layers.*.attn.w?  ColwiseParallel\n"
        "layers.*.attn.wo  RowwiseParallel(output S(1), local output)\n"
        "layers.*.norm?    SequenceParallel(sequence_dim 1)\n"
        "tok               RowwiseParallel(input R, desired R)\n"
        "head              PrepareModuleOutput([S(-1)] -> [R], local output)\n");
}
