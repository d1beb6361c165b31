#include "tessera/dtensor/io/weights.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/tests/dtensor/io/test_files.h"

namespace tessera {
namespace {

// Has two layers, a buffer, an undefined bias, and a weight under two names.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("second", second);
    register_parameter("tied", first->weight);
    register_buffer("count", torch::zeros({}, torch::kLong));
  }

  torch::nn::Linear first{torch::nn::LinearOptions(3, 4)};
  torch::nn::Linear second{torch::nn::LinearOptions(4, 3).bias(false)};
};
TORCH_MODULE(Net);

std::vector<at::Tensor> values(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& t : module.parameters()) all.push_back(t.detach().clone());
  for (const at::Tensor& t : module.buffers()) all.push_back(t.clone());
  return all;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

std::vector<std::string> names_in(const std::string& path) {
  const SafetensorsFile file(path);
  std::vector<std::string> names;
  for (const TensorEntry& entry : file.tensors()) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  return names;
}

TEST_CASE("weights: a module is saved under its first names and loads into another of its kind") {
  const TempFolder folder;
  Net saved;
  saved->buffers()[0].fill_(7);
  save_weights(*saved, folder / "m.safetensors");
  CHECK(names_in(folder / "m.safetensors") == std::vector<std::string>{"count", "first.bias", "second.weight", "tied"});
  CHECK(SafetensorsFile(folder / "m.safetensors").metadata() == std::map<std::string, std::string>{{"format", "pt"}});

  Net loaded;
  const at::Tensor handle = loaded->first->weight;
  const auto version = handle._version();
  load_weights(*loaded, folder / "m.safetensors");
  CHECK(equal(values(*loaded), values(*saved)));
  CHECK(handle.equal(saved->first->weight));  // in place: handles to it have the new values
  CHECK(handle.requires_grad());
  CHECK(handle._version() > version);
}

TEST_CASE("weights: saved in several files, byte-equal each time") {
  const TempFolder folder;
  Net net;
  save_weights(*net, folder.path(), {.max_shard_bytes = 60, .metadata = {{"k", "v"}}});
  const std::string first = read_text(folder / "model-00001-of-00003.safetensors");
  CHECK(first.find(R"("__metadata__":{"k":"v"})") != std::string::npos);
  Net loaded;
  load_weights(*loaded, folder.path());
  CHECK(equal(values(*loaded), values(*net)));
  save_weights(*loaded, folder.path(), {.max_shard_bytes = 60, .metadata = {{"k", "v"}}});
  CHECK(read_text(folder / "model-v2-00001-of-00003.safetensors") == first);
}

TEST_CASE("weights: the extra state of other engines' layers in a file is ignored") {
  const TempFolder folder;
  const std::string path = folder / "m.safetensors";
  struct Layer : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", at::zeros({2}));
  } layer;
  const auto file = [&](const std::string& name) {
    const std::string json = R"({"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},")" + name +
                             R"(":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})";
    write_text(path, safetensors_bytes(json, std::string("\0\0\x80\x3f\0\0\0\x40\x07", 9)));
  };
  for (const char* const name : {"_extra_state", "encoder.0._extra_state"}) {
    file(name);
    load_weights(layer, path);
    CHECK(layer.weight.equal(at::tensor({1.0F, 2.0F})));
  }
  file("own_extra_state");
  CHECK_THROWS_WITH_AS(load_weights(layer, path), doctest::Contains("Not in the module: 'own_extra_state'"),
                       std::invalid_argument);
}

TEST_CASE("weights: one message lists everything that does not fit, and nothing changes") {
  const TempFolder folder;
  const std::string path = folder / "m.safetensors";
  struct Row {
    const char* why;
    std::string json;
    int64_t bytes;
    LoadOptions options;
    std::vector<const char*> want;
  };
  const std::string count = R"("count":{"dtype":"I64","shape":[],"data_offsets":[0,8]})";
  const std::string bias = R"("first.bias":{"dtype":"F32","shape":[4],"data_offsets":[8,24]})";
  const std::string weight = R"("first.weight":{"dtype":"F32","shape":[4,3],"data_offsets":[24,72]})";
  const std::string second = R"("second.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[72,120]})";
  const std::vector<Row> rows = {
      {"missing",
       "{" + count + "," + bias + "," + weight + "}",
       72,
       {},
       {"Missing in the file: 'second.weight' (rename"}},
      {"unexpected",
       "{" + count + "," + bias + "," + weight + "," + second +
           R"(,"x":{"dtype":"U8","shape":[1],"data_offsets":[120,121]}})",
       121,
       {},
       {"Not in the module: 'x' (set `allow_unexpected`"}},
      {"shape",
       "{" + count + "," + bias + "," + weight +
           R"(,"second.weight":{"dtype":"F32","shape":[4,3],"data_offsets":[72,120]}})",
       120,
       {},
       {"Of another shape: 'second.weight' is [4, 3] in the file and [3, 4] in the module."}},
      {"dtype",
       "{" + count + R"(,"first.bias":{"dtype":"I32","shape":[4],"data_offsets":[8,24]},)" + weight + "," + second +
           "}",
       120,
       {},
       {"Of another dtype: 'first.bias' is Int in the file and Float in the module (set `convert_dtype`"}},
      {"all at once",
       R"({"x":{"dtype":"F64","shape":[],"data_offsets":[0,8]},)" + bias +
           R"(,"first.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[24,72]}})",
       72,
       {},
       {"which was not changed", "Missing in the file: 'second.weight', 'count'", "Not in the module: 'x'",
        "'tied' is [3, 4] in the file and [4, 3]"}},
      {"renamed away",
       "{" + count + "," + bias + "," + weight + "," + second + "}",
       120,
       {.rename = [](const std::string& name) { return "model." + name; }},
       {"Missing in the file: 'model.tied', 'model.first.bias', 'model.second.weight', 'model.count'"}},
      {"a rename that throws",
       "{" + count + "}",
       8,
       {.rename = [](const std::string&) -> std::string { throw std::runtime_error("no name"); }},
       {"no name"}},
      {"a progress that throws",
       "{" + count + "," + bias + "," + weight + "," + second + "}",
       120,
       {.progress =
            [](int64_t done, int64_t) {
              if (done > 100) throw std::runtime_error("enough");
            }},
       {"enough"}},
  };
  Net net;
  const std::vector<at::Tensor> before = values(*net);
  for (const Row& row : rows) {
    CAPTURE(row.why);
    write_text(path, safetensors_bytes(row.json, std::string(static_cast<std::size_t>(row.bytes), '\1')));
    const std::string text = message_of([&] { load_weights(*net, path, row.options); });
    CAPTURE(text);
    for (const char* want : row.want) CHECK(text.find(want) != std::string::npos);
    CHECK(equal(values(*net), before));
  }
}

TEST_CASE("weights: rename, allow_missing, allow_unexpected, convert_dtype, progress and in_place") {
  const TempFolder folder;
  const std::string path = folder / "m.safetensors";
  Net saved;
  save_weights(*saved, path);

  struct Other : torch::nn::Module {
    Other() {
      register_module("a", a);
      register_module("norm", norm);
      a->to(torch::kDouble);
    }
    torch::nn::Linear a{torch::nn::LinearOptions(3, 4)};
    torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({4})};
  };
  for (const bool in_place : {false, true}) {
    Other other;
    std::vector<std::pair<int64_t, int64_t>> seen;
    LoadOptions options;
    options.rename = [](const std::string& name) -> std::string {
      return name == "a.weight" ? "tied" : name == "a.bias" ? "first.bias" : name == "norm.bias" ? "" : name;
    };
    options.allow_missing = {"norm.w?ight"};
    options.allow_unexpected = true;
    options.convert_dtype = true;
    options.in_place = in_place;
    options.progress = [&](int64_t done, int64_t total) { seen.emplace_back(done, total); };
    load_weights(other, path, options);
    CHECK((other.a->weight.scalar_type() == torch::kDouble));
    CHECK(other.a->weight.equal(saved->first->weight.to(torch::kDouble)));
    CHECK(other.a->bias.equal(saved->first->bias.to(torch::kDouble)));
    CHECK(other.norm->weight.equal(torch::ones({4})));
    CHECK((seen == std::vector<std::pair<int64_t, int64_t>>{{16, 64}, {64, 64}}));
  }
}

TEST_CASE("weights: a tied tensor may stand in the file under any of its names, or all") {
  const TempFolder folder;
  const std::string path = folder / "m.safetensors";
  const std::string rest =
      R"("count":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"first.bias":{"dtype":"F32","shape":[4],"data_offsets":[8,24]},)"
      R"("second.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[24,72]})";
  Net net;
  write_text(path,
             safetensors_bytes("{" + rest + R"(,"first.weight":{"dtype":"F32","shape":[4,3],"data_offsets":[72,120]}})",
                               std::string(120, '\0')));
  load_weights(*net, path);
  CHECK(net->first->weight.equal(torch::zeros({4, 3})));
  write_text(
      path,
      safetensors_bytes(
          "{" + rest +
              R"(,"first.weight":{"dtype":"F32","shape":[4,3],"data_offsets":[72,120]},"tied":{"dtype":"F32","shape":[4,3],"data_offsets":[120,168]}})",
          std::string(120, '\0') + std::string(48, '\1')));
  load_weights(*net, path);
  CHECK(
      net->first->weight.view(torch::kByte).equal(torch::ones({4, 12}, torch::kByte)));  // "tied" was registered first
}

TEST_CASE("weights: a weight tied by assigning the member is what is saved and loaded, not the tensor left behind") {
  const TempFolder folder;
  struct Model : torch::nn::Module {
    Model() {
      register_module("tok", tok);
      register_module("head", head);
      head->weight = tok->weight;
    }
    torch::nn::Embedding tok{4, 3};
    torch::nn::Linear head{torch::nn::LinearOptions(3, 4).bias(false)};
  };
  Model saved, loaded;
  save_weights(saved, folder / "m");
  CHECK(names_in(folder / "m") == std::vector<std::string>{"tok.weight"});
  load_weights(loaded, folder / "m");
  CHECK(loaded.head->weight.equal(saved.tok->weight));
  CHECK(loaded.head->weight.is_same(loaded.tok->weight));
}

TEST_CASE("weights: a bias that was assigned is what is saved and loaded, also in a layer that was made without one") {
  const TempFolder folder;
  struct Model : torch::nn::Module {
    explicit Model(double value) {
      register_module("with", with);
      register_module("without", without);
      with->bias = torch::full({2}, value);
      without->bias = torch::full({2}, 2 * value);
    }
    torch::nn::Linear with{3, 2};
    torch::nn::Linear without{torch::nn::LinearOptions(2, 2).bias(false)};
  };
  const Model saved(3);
  Model loaded(0);
  save_weights(saved, folder / "m");
  CHECK(names_in(folder / "m") ==
        std::vector<std::string>{"with.bias", "with.weight", "without.bias", "without.weight"});
  load_weights(loaded, folder / "m");
  CHECK(loaded.with->bias.equal(torch::full({2}, 3.0)));
  CHECK(loaded.without->bias.equal(torch::full({2}, 6.0)));
}

TEST_CASE("weights: a file does not load into an expanded tensor, and nothing changes") {
  const TempFolder folder;
  struct Model : torch::nn::Module {
    Model() {
      register_module("fc", fc);
      register_buffer("scale", torch::ones({1}).expand({8}));
    }
    torch::nn::Linear fc{3, 4};
  };
  Model saved, loaded;
  save_weights(saved, folder / "m");
  const std::vector<at::Tensor> before = values(loaded);
  CHECK_THROWS_WITH_AS(load_weights(loaded, folder / "m"),
                       doctest::Contains("several elements: 'scale' (clone() them)"), std::invalid_argument);
  CHECK(equal(values(loaded), before));
}

TEST_CASE("weights: what a file cannot hold is refused by name") {
  const TempFolder folder;
  torch::nn::Module module;
  module.register_buffer("wave", torch::zeros({2}, torch::kComplexDouble));
  CHECK_THROWS_WITH_AS(save_weights(module, folder / "f"),
                       doctest::Contains("tensor 'wave': safetensors has no dtype for ComplexDouble"),
                       std::invalid_argument);
  torch::nn::Module sparse;
  sparse.register_buffer("holes", torch::zeros({2}).to_sparse());
  CHECK_THROWS_WITH_AS(save_weights(sparse, folder / "f"),
                       doctest::Contains("tensor 'holes': a Float tensor that is not strided"), std::invalid_argument);
  torch::nn::Module meta;
  meta.register_buffer("ghost", torch::zeros({2}, torch::kMeta));
  CHECK_THROWS_WITH_AS(load_weights(meta, folder / "f"), doctest::Contains("tensor 'ghost': a Float tensor on meta"),
                       std::invalid_argument);
  CHECK(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace tessera
