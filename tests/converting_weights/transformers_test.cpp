// Loads what Python's transformers saves, and compares logits with those that it computes.

#include <cstdlib>
#include <string>

#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/examples/language_model/llama.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/examples/language_model/weight_rules.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

namespace tessera {
namespace {

template <class Model>
void compare(Model model, const std::string& folder, const WeightRules& rules, double tolerance) {
  const torch::NoGradGuard no_grad;
  load_weights(*model, folder, {.rules = rules});
  model->eval();
  const Checkpoint reference(folder + "/reference.safetensors");
  const auto read = [&](const char* name) { return reference.read_box(name, whole_box(reference.find(name)->shape)); };
  const double difference = (model(read("ids")) - read("logits")).abs().max().template item<double>();
  CAPTURE(folder);
  CHECK(difference < tolerance);
}

TEST_CASE("gpt2_rules and llama_rules: what transformers saves gives transformers' logits") {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const PrivateFolder folder;
  const testing::ShellOutcome made =
      testing::shell(std::string(std::getenv("PYTHON")) + " " + std::getenv("MAKE_MODELS") + " " + folder.path());
  CAPTURE(made.output);
  REQUIRE(made.exit_code == 0);
  compare(Transformer(TransformerOptions{
              .vocabulary = 11, .hidden = 12, .layers = 2, .heads = 6, .sequence = 7, .gelu = "tanh"}),
          folder.path() + "/gpt2", gpt2_rules("transformer."), 1e-10);
  // Heads have 4 elements, so that the order of rows differs. transformers computes norms and angles of Llama in
  // float32 whatever the model's dtype.
  compare(Llama(LlamaOptions{
              .vocabulary = 11, .hidden = 24, .intermediate = 10, .layers = 2, .heads = 6, .key_value_heads = 3}),
          folder.path() + "/llama", llama_rules(6, 3), 1e-4);
  compare(
      Llama(LlamaOptions{.vocabulary = 11,
                         .hidden = 16,
                         .intermediate = 10,
                         .layers = 2,
                         .heads = 2,
                         .key_value_heads = 1,
                         .rotary_base = 500.0,
                         .rotary_scaling = LlamaRotaryScaling{.factor = 8.0, .low = 1.0, .high = 4.0, .length = 64.0},
                         .norm_epsilon = 1e-6}),
      folder.path() + "/scaled_llama", llama_rules(2, 1), 1e-4);
}

TEST_CASE("Llama in bfloat16: neighbouring positions differ, however late they are") {
  const torch::NoGradGuard no_grad;
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  torch::manual_seed(1);
  Llama model(LlamaOptions{.vocabulary = 11, .hidden = 16, .layers = 1, .heads = 2, .key_value_heads = 2});
  model->to(at::kBFloat16);
  const at::Tensor plain = model->rotations(600, torch::dtype(at::kFloat)).first;
  const at::Tensor rounded = model->rotations(600, torch::dtype(at::kBFloat16)).first;
  CHECK((rounded.scalar_type() == at::kBFloat16));
  CHECK((rounded.to(at::kFloat) - plain).abs().max().item<double>() < 0.004);
}

}  // namespace
}  // namespace tessera
