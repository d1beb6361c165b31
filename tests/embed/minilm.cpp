#include "tessera/tests/embed/minilm.h"

#include <cstdlib>
#include <fstream>
#include <stdexcept>

#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/io/weights.h"
#include "tessera/examples/embed/tokenizer.h"

namespace embed {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  if (value != nullptr) return value;
  throw std::runtime_error(fmt::format("the environment variable {} is missing; the BUILD file sets it", name));
}

Reference read_reference() {
  const nlohmann::json file = nlohmann::json::parse(std::ifstream(environment("EMBED_REFERENCE")));
  Reference reference;
  std::vector<at::Tensor> rows;
  for (const nlohmann::json& sentence : file.at("sentences")) {
    reference.texts.push_back(sentence.at("text").get<std::string>());
    rows.push_back(at::tensor(sentence.at("vector").get<std::vector<float>>()));
  }
  reference.vectors = at::stack(rows);
  return reference;
}

Inputs inputs_of(const std::vector<std::string>& texts) {
  const Batch batch = Tokenizer::from_file(environment("MINILM") + "/vocab.txt").encode_batch(texts);
  return {.ids = at::tensor(batch.ids, at::kLong).view({batch.sentences, batch.length}),
          .mask = at::tensor(batch.mask, at::kLong).view({batch.sentences, batch.length})};
}

void load_minilm(torch::nn::Module& model) {
  // BERT's pooler and position numbers are in the file too.
  tessera::load_weights(model, environment("MINILM") + "/model.safetensors", {.allow_unexpected = true});
}

double smallest_cosine(const at::Tensor& vectors, const at::Tensor& reference) {
  const at::Tensor a = vectors.to(at::kDouble), b = reference.to(at::kDouble);
  return ((a * b).sum(1) / (a.norm(2, 1) * b.norm(2, 1))).min().item<double>();
}

}  // namespace embed
