#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

// Holds what the tests of the main job share: the weights that tools/setup brought, the sentences and Python's vectors
// for them.
namespace embed {

// The value of an environment variable that the BUILD file sets; fails the test without it.
std::string environment(const char* name);

struct Reference {
  std::vector<std::string> texts;
  at::Tensor vectors;  // float [sentences, 384]
};
Reference read_reference();

struct Inputs {
  at::Tensor ids;
  at::Tensor mask;
};
Inputs inputs_of(const std::vector<std::string>& texts);

// Plain modules and DTensors alike.
void load_minilm(torch::nn::Module& model);

// The smallest cosine between a row of `vectors` and the same row of `reference`.
double smallest_cosine(const at::Tensor& vectors, const at::Tensor& reference);

}  // namespace embed
