// Loads files with the names of Python's transformers by the rules beside the models, in many layouts, and compares
// what the modules compute with what transformers' formulas give on the files' tensors.

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/examples/language_model/llama.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/examples/language_model/weight_rules.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/converting_weights/hugging_face.h"
#include "tessera/tests/dtensor/io/same_message.h"
#include "tessera/tests/dtensor/io/save_list.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using namespace testing;

DeviceMesh line() { return init_device_mesh("cpu", {world()->size()}, {"tp"}, world()); }

DeviceMesh grid() {
  const int64_t size = world()->size(), dp = size % 2 == 0 ? 2 : 1;
  return init_device_mesh("cpu", {dp, size / dp}, {"dp", "tp"}, world());
}

// Writes a file, once for all ranks, and returns its path.
std::string written(const NamedValues& values, const std::string& name) {
  const std::filesystem::path path = std::filesystem::path(store_path()).parent_path() / (name + ".safetensors");
  std::vector<SavedTensor> tensors;
  for (const auto& [key, value] : values) tensors.push_back({key, value});
  if (world()->rank() == 0) save_tensors(tensors, {}, path, 0, {{"format", "pt"}}, "test");
  barrier(line(), 0);
  return path;
}

// Is a kind of module, its file, and what it must compute.
struct Case {
  std::string path;
  WeightRules rules;
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  ParallelPlan plan;
  at::Tensor ids, want;
};

const ParallelPlan kGpt2Plan = {{"layers.*.attn.w[qkv]", ColwiseParallel()},
                                {"layers.*.attn.wo", RowwiseParallel()},
                                {"layers.*.mlp.up", ColwiseParallel()},
                                {"layers.*.mlp.down", RowwiseParallel()},
                                {"tok", RowwiseParallel()}};
const ParallelPlan kLlamaPlan = {{"layers.*.attn.w[qkv]", ColwiseParallel()},
                                 {"layers.*.attn.wo", RowwiseParallel()},
                                 {"layers.*.mlp.w[13]", ColwiseParallel()},
                                 {"layers.*.mlp.w2", RowwiseParallel()},
                                 {"head", ColwiseParallel()}};

// The tied one has the activation of the published models.
Case gpt2_case(bool tied) {
  const Sizes sizes;
  const std::string prefix = tied ? "transformer." : "";
  const NamedValues values = gpt2_values(sizes, prefix);
  const at::Tensor ids = torch::tensor({{1, 4, 2, 8, 5}, {7, 10, 0, 3, 3}});
  const TransformerOptions options = {.vocabulary = sizes.vocabulary,
                                      .hidden = sizes.hidden,
                                      .layers = sizes.layers,
                                      .heads = sizes.heads,
                                      .sequence = sizes.sequence,
                                      .dropout = 0,
                                      .tied = tied,
                                      .gelu = tied ? "tanh" : "none"};
  return {.path = written(values, tied ? "gpt2_tied" : "gpt2"),
          .rules = gpt2_rules(prefix),
          .make = [options] { return std::make_shared<TransformerImpl>(options); },
          .plan = kGpt2Plan,
          .ids = ids,
          .want = gpt2_logits(values, sizes, prefix, ids,
                              [&](const at::Tensor& x) { return tied ? gelu_new(x) : torch::gelu(x); })};
}

Case llama_case(bool own_output) {
  const Sizes sizes;
  const NamedValues values = llama_values(sizes, own_output);
  const at::Tensor ids = torch::tensor({{1, 4, 2, 8, 5}, {7, 10, 0, 3, 3}});
  const LlamaOptions options = {.vocabulary = sizes.vocabulary,
                                .hidden = sizes.hidden,
                                .intermediate = sizes.intermediate,
                                .layers = sizes.layers,
                                .heads = sizes.heads,
                                .key_value_heads = sizes.key_value_heads,
                                .tied = !own_output};
  return {.path = written(values, own_output ? "llama" : "llama_tied"),
          .rules = llama_rules(sizes.heads, sizes.key_value_heads),
          .make = [options] { return std::make_shared<LlamaImpl>(options); },
          .plan = kLlamaPlan,
          .ids = ids,
          .want = llama_logits(values, sizes, ids)};
}

// Calls `run` with the module as what it is.
template <class Run>
auto as_model(torch::nn::Module& module, const Run& run) {
  if (auto* model = module.as<TransformerImpl>()) return run(*model);
  return run(*module.as<LlamaImpl>());
}

// Returns the bytes of this rank's pieces.
int64_t bytes_of_pieces(torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const ModuleTensor& item : module_tensors(module)) {
    bytes += (is_dtensor(item.tensor) ? to_local(item.tensor).numel() : item.tensor.numel()) *
             static_cast<int64_t>(item.tensor.element_size());
  }
  return bytes;
}

void load(torch::nn::Module& module, const Case& job) {
  int64_t read = -1, total = -1;
  const auto progress = [&](int64_t done, int64_t all) { std::tie(read, total) = std::pair(done, all); };
  load_weights(module, job.path, {.rules = job.rules, .progress = progress});
  CHECK(read == total);
  CHECK(read == bytes_of_pieces(module));  // each rank reads its pieces and nothing more
}

// Returns the whole values of all tensors of a module, by their first names.
NamedValues whole_values(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  NamedValues all;
  for (const ModuleTensor& item : module_tensors(module)) {
    all[item.names.front()] = is_dtensor(item.tensor) ? full_tensor(item.tensor) : item.tensor.clone();
  }
  return all;
}

void check_equal(const NamedValues& got, const NamedValues& want) {
  REQUIRE(got.size() == want.size());
  for (const auto& each : want) {
    CAPTURE(each.first);
    CHECK(got.at(each.first).equal(each.second));
  }
}

void check_case(const Case& job) {
  const torch::NoGradGuard no_grad;
  const std::shared_ptr<torch::nn::Module> plain = job.make();
  load(*plain, job);
  const at::Tensor alone = as_model(*plain, [&](auto& model) { return model.forward(job.ids); });
  CHECK(torch::allclose(alone, job.want, 1e-12, 1e-12));
  const NamedValues want = whole_values(*plain);

  // Each parameter cut along one dimension, whatever its size: some ranks get uneven and empty pieces.
  for (const int64_t dim : {0, 1}) {
    const std::shared_ptr<torch::nn::Module> module = job.make();
    const DeviceMesh mesh = line();
    for (const ModuleTensor& item : module_tensors(*module)) {
      const std::vector<int64_t> ragged = [&] {
        std::vector<int64_t> sizes(static_cast<std::size_t>(mesh.size()), 1);
        sizes.back() = item.tensor.size(0) - mesh.size() + 1;
        return sizes;
      }();
      const Placement cut = item.tensor.dim() > dim ? Shard(dim) : RaggedShard(0, ragged);
      distribute_in_place(item.tensor, mesh, {cut}, kNoSource);
    }
    load(*module, job);
    check_equal(whole_values(*module), want);
  }

  // By styles, and as ZeRO-3.
  for (const bool zero : {false, true}) {
    const DeviceMesh mesh = grid();
    const std::shared_ptr<torch::nn::Module> module = job.make();
    as_model(*module, [&](auto& model) {
      ParallelizeOptions options;
      if (zero) options.data_placement = Shard(0);
      auto parallel = parallelize_module(model, mesh, job.plan, options);
      load(*module, job);
      check_equal(whole_values(*module), want);
      const at::Tensor ids = distribute_tensor(job.ids, mesh, {Shard(0), Replicate()}, kNoSource);
      CHECK(torch::allclose(full_tensor(parallel(ids)), job.want, 1e-10, 1e-10));
    });
  }
}

TESSERA_RANKS_TEST_CASE("gpt2_rules: a module has transformers' weights and gives its logits, in any layout",
                        {1, 2, 3, 4}) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  for (const bool tied : {false, true}) check_case(gpt2_case(tied));
}

TESSERA_RANKS_TEST_CASE("llama_rules: a module has transformers' weights and gives its logits, in any layout",
                        {1, 2, 3, 4}) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  for (const bool own_output : {false, true}) check_case(llama_case(own_output));
}

TESSERA_RANKS_TEST_CASE("rules: the system reads no more than a rank's pieces", {2, 4}) {
  const DeviceMesh mesh = line();
  const std::string path = written({{"h.c_attn", torch::ones({400, 1200}, torch::kFloat)},
                                    {"h.q_proj", torch::ones({512, 300}, torch::kFloat)},
                                    {"h.k", torch::ones({160, 300}, torch::kFloat)},
                                    {"h.v", torch::ones({160, 300}, torch::kFloat)}},
                                   "large");
  torch::nn::Module module;
  const auto add = [&](const char* name, at::IntArrayRef shape, const Placement& placement) {
    module.register_parameter(name, torch::zeros(shape));
    distribute_in_place(module.named_parameters()[name], mesh, {placement}, kNoSource);
  };
  add("q", {400, 400}, Shard(0));
  add("k", {400, 400}, Shard(1));
  add("v", {400, 400}, Shard(0));
  add("rotary", {512, 300}, Shard(0));
  add("fused", {320, 300}, Shard(1));
  const WeightSource attention = from_file("h.c_attn");
  const WeightRules rules = {
      .rules = {{"q", attention.split(1, 0, 3).transpose(0, 1)},
                {"k", attention.split(1, 1, 3).transpose(0, 1)},
                {"v", attention.split(1, 2, 3).transpose(0, 1)},
                {"rotary", from_file("h.q_proj").unflatten(0, {8, 2, -1}).transpose(1, 2).flatten(0, 2)},
                {"fused", fuse(0, {from_file("h.k"), from_file("h.v")})}},
      .ignored = {}};
  const int64_t pieces = bytes_of_pieces(module);
  barrier(mesh, 0);
  const int64_t before = bytes_read_by_process();
  load_weights(module, path, {.rules = rules});
  const int64_t read = bytes_read_by_process() - before;
  // /proc/self/io also counts the header, and what the collectives read from sockets.
  CHECK(read >= pieces);
  CHECK(read < pieces + 20000);
  for (const at::Tensor& parameter : module.parameters()) CHECK(to_local(parameter).eq(1).all().item<bool>());
}

TESSERA_RANKS_TEST_CASE("rules: what does not fit is the same error on every rank, and nothing changes", {1, 3}) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const Case job = llama_case(true);
  const std::shared_ptr<torch::nn::Module> module = job.make();
  for (const ModuleTensor& item : module_tensors(*module)) {
    distribute_in_place(item.tensor, line(), {Shard(0)}, kNoSource);
  }
  const NamedValues before = whole_values(*module);
  WeightRules rules = job.rules;
  rules.rules[3].source = rules.rules[3].source.split(0, 0, 5);
  rules.rules.erase(rules.rules.begin());
  rules.rules.push_back({"tail.*", from_file("tail.*")});
  const std::string text = same_message(line(), [&] { load_weights(*module, job.path, {.rules = rules}); });
  CAPTURE(text);
  for (const char* const want :
       {"which was not changed", "No rule is for: 'tok.weight'", "rules: \"tail.*\" <- from_file(\"tail.*\").",
        "'layers.1.attn.wq.weight' is [24, 24] in the module, and by the rule \"layers.*.attn.wq.weight\" <- "
        "from_file(",
        "there is no part 0 of 5 equal parts along dimension 0 of shape [24, 24]"}) {
    CHECK(text.find(want) != std::string::npos);
  }
  if (world()->size() > 1) {
    rules = job.rules;
    if (world()->rank() == 1) rules.ignored.push_back("x");
    const std::string differ = same_message(line(), [&] { load_weights(*module, job.path, {.rules = rules}); });
    CHECK(differ.find("load_weights: the ranks opened different checkpoints or gave different rules") !=
          std::string::npos);
  }
  check_equal(whole_values(*module), before);
}

// ---- Modules whose parameters lie on several meshes.

struct Stages : torch::nn::Module {
  Stages() {
    for (const char* const name : {"first", "second", "both"}) {
      register_module(name, torch::nn::Linear(torch::nn::LinearOptions(5, 7)));
    }
    register_buffer("plain", torch::arange(3, torch::kDouble));
  }
  void fill(double start) {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& each : parameters()) {
      each.copy_(torch::arange(each.numel(), torch::kDouble).view(each.sizes()) + start++);
    }
  }
};

void distribute(torch::nn::Module& module, const std::string& name, const DeviceMesh& mesh) {
  auto& child = *module.named_children()[name];
  for (const at::Tensor& each : child.parameters()) {
    distribute_in_place(each, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Shard(0)), kNoSource);
  }
}

TESSERA_RANKS_TEST_CASE("weights: a module on meshes of other ranks each is described, saved and loaded", {2, 3, 4}) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const int64_t size = world()->size(), half = size / 2;
  std::vector<int64_t> low, high;
  for (int64_t rank = 0; rank < size; ++rank) (rank < half ? low : high).push_back(rank);
  const DeviceMesh first(world(), c10::kCPU, Mesh({half}, {"tp"}, low));
  const DeviceMesh second(world(), c10::kCPU, Mesh({size - half}, {"tp"}, high));
  const auto make = [&](double start, bool with_both) {
    auto module = std::make_unique<Stages>();
    module->fill(start);
    distribute(*module, "first", second);  // the mesh that appears first need not hold rank 0
    distribute(*module, "second", first);
    if (with_both) distribute(*module, "both", line());
    return module;
  };
  for (const bool with_both : {false, true}) {
    const std::filesystem::path folder = std::filesystem::path(store_path()).parent_path();
    const std::string path = folder / (with_both ? "three_meshes" : "two_meshes");
    Stages plain;
    plain.fill(10);
    const auto module = make(10, with_both);
    save_weights(*module, path);
    barrier(line(), 0);
    Stages alone;
    load_weights(alone, path);
    check_equal(whole_values(alone), whole_values(plain));

    const auto loaded = make(-5, with_both);
    load_weights(*loaded, path);
    for (const ModuleTensor& item : module_tensors(*loaded)) {
      const std::string& name = item.names.front();
      CAPTURE(name);
      if (!is_dtensor(item.tensor)) continue;
      if (mesh_of(item.tensor).is_member()) {
        CHECK(full_tensor(item.tensor.detach()).equal(whole_values(plain).at(name)));
      } else {
        CHECK(to_local(item.tensor).numel() == 0);
      }
    }

    const Description described = describe(*loaded);
    const bool is_low = world()->rank() < half;
    for (const DescriptionRow& row : described.rows) {
      if (row.path != "first" && row.path != "second") continue;
      CHECK((row.bytes_here == 0) == ((row.path == "first") == is_low));
      CHECK(row.mesh == (row.path == "first" ? second : first).to_string());
    }
    const std::string text = to_string(described);
    CHECK(text.find(first.to_string()) != std::string::npos);
    CHECK(text.find(second.to_string()) != std::string::npos);

    // What one rank of one mesh meets is the error of all.
    const bool fails = world()->rank() == size - 1;
    const std::string text_of_all =
        same_message(line(), [&] { load_weights(*loaded, fails ? path + "_nowhere" : path); });
    CHECK(text_of_all.find("rank " + std::to_string(size - 1) + ": cannot open '") != std::string::npos);
    CHECK(same_message(line(), [&] { save_weights(*module, folder / "no/such/f"); }).find("there is no folder '") !=
          std::string::npos);
  }
}

}  // namespace
}  // namespace tessera
