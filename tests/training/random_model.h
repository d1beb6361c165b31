#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/tests/dtensor/random.h"

// Makes language models of random parts, as users write them for one process.
namespace tessera::testing {

struct PartShape {
  enum class Kind : uint8_t { kMlp, kGated, kAttention, kLinear };
  Kind kind = Kind::kMlp;
  bool norm = true;
  bool bias = true;
  bool checkpointed = false;  // training computes its activations again in backward
  int64_t every = 1;          // it is used in steps that are multiples of this, and has no gradient in the others
};

struct ModelShape {
  int64_t width = 12, heads = 4, hidden = 10, vocabulary = 11, length = 5;
  bool tied = false;  // the head's weight is the embedding's
  std::vector<PartShape> parts;
};

ModelShape random_shape(Random& random);
std::string to_string(const ModelShape& shape);

// Maps x [batch, length, width] to x plus what its part computes of it.
struct PartImpl : torch::nn::Module {
  PartImpl(const ModelShape& shape, const PartShape& part);
  at::Tensor forward(const at::Tensor& x);

  const PartShape part;
  const int64_t heads;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, gate{nullptr}, down{nullptr}, q{nullptr}, k{nullptr}, v{nullptr}, out{nullptr};

 private:
  at::Tensor computed(const at::Tensor& h);
  at::Tensor by_heads(const at::Tensor& x) const;
};

// Maps ids [batch, length] to logits [batch, length, vocabulary]. Parameters are float64, and those of one seed equal.
struct RandomModelImpl : torch::nn::Module {
  RandomModelImpl(const ModelShape& shape, unsigned seed);
  at::Tensor forward(const at::Tensor& ids, int64_t step);

  const ModelShape shape;
  torch::nn::Embedding embed{nullptr};
  std::vector<std::shared_ptr<PartImpl>> parts;  // "part0", "part1", ...
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(RandomModel);

}  // namespace tessera::testing
