#include "tessera/examples/embed/bert.h"

#include <set>
#include <string>

#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace embed {
namespace {

BertConfig small_config() {
  BertConfig config;
  config.vocabulary = 11;
  config.hidden = 8;
  config.layers = 2;
  config.heads = 2;
  config.intermediate = 16;
  config.positions = 10;
  return config;
}

TEST_CASE("BertModel: its parameters have the names of the published weights, but for the pooler's") {
  const BertModel model(small_config());
  std::set<std::string> names;
  for (const auto& item : model->named_parameters()) names.insert(item.key());
  CHECK(names.size() == 3 + 2 + 2 * 16);
  CHECK(model->named_buffers().size() == 0);
  const std::set<std::string> in_first_layer = {"attention.self.query.weight",
                                                "attention.self.query.bias",
                                                "attention.self.key.weight",
                                                "attention.self.key.bias",
                                                "attention.self.value.weight",
                                                "attention.self.value.bias",
                                                "attention.output.dense.weight",
                                                "attention.output.dense.bias",
                                                "attention.output.LayerNorm.weight",
                                                "attention.output.LayerNorm.bias",
                                                "intermediate.dense.weight",
                                                "intermediate.dense.bias",
                                                "output.dense.weight",
                                                "output.dense.bias",
                                                "output.LayerNorm.weight",
                                                "output.LayerNorm.bias"};
  for (const std::string& name : in_first_layer) CHECK(names.count("encoder.layer.0." + name) == 1);
  for (const char* const table : {"word", "position", "token_type"}) {
    CHECK(names.count(std::string("embeddings.") + table + "_embeddings.weight") == 1);
  }
  CHECK(names.count("embeddings.LayerNorm.weight") == 1);
}

TEST_CASE("BertModel: padding changes nothing for the tokens that stand") {
  const at::NoGradGuard no_grad;
  BertModel model(small_config());
  model->eval();
  const at::Tensor ids = at::tensor({2, 5, 7, 3}, at::kLong).view({1, 4});
  const at::Tensor padded = at::cat({ids, at::full({1, 3}, 9, at::kLong)}, 1);
  const at::Tensor mask = at::cat({at::ones({1, 4}, at::kLong), at::zeros({1, 3}, at::kLong)}, 1);
  const at::Tensor alone = sentence_vectors(model(ids, at::ones_like(ids)), at::ones_like(ids));
  CHECK(at::allclose(sentence_vectors(model(padded, mask), mask), alone, 1e-5, 1e-6));
}

TEST_CASE("sentence_vectors: the mean over the tokens that stand, of length 1") {
  const at::Tensor states = at::tensor({3.0, 0.0, 3.0, 8.0, 100.0, 100.0}).view({1, 3, 2});
  const at::Tensor mask = at::tensor({1, 1, 0}, at::kLong).view({1, 3});
  CHECK(at::allclose(sentence_vectors(states, mask), at::tensor({0.6, 0.8}).view({1, 2})));
}

TEST_CASE("BertModel: drops out in training alone, and every parameter gets a gradient") {
  BertModel model(small_config());
  const at::Tensor ids = at::tensor({2, 5, 7, 3}, at::kLong).view({1, 4});
  const at::Tensor mask = at::ones_like(ids);
  model->eval();
  CHECK(at::equal(model(ids, mask), model(ids, mask)));
  model->train();
  CHECK_FALSE(at::equal(model(ids, mask), model(ids, mask)));
  model(ids, mask).square().sum().backward();
  for (const auto& item : model->named_parameters()) {
    CAPTURE(item.key());
    CHECK(item.value().grad().defined());
  }
}

}  // namespace
}  // namespace embed
