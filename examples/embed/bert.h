#pragma once

// This file is BERT's encoder, written for one process. Nothing in it may depend on ranks, meshes or shards: main.cpp
// parallelizes it without a change.

#include <cstdint>
#include <limits>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

namespace embed {

// The defaults are those of all-MiniLM-L6-v2.
struct BertConfig {
  int64_t vocabulary = 30522;
  int64_t hidden = 384;
  int64_t layers = 6;
  int64_t heads = 12;
  int64_t intermediate = 1536;
  int64_t positions = 512;
  int64_t token_types = 2;
  double layer_norm_eps = 1e-12;
  double dropout = 0.1;
};

inline torch::nn::LayerNorm make_layer_norm(const BertConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.hidden}).eps(config.layer_norm_eps));
}

// In every class below the names of modules and parameters are those of the published weights.

// ids [b, t] -> [b, t, hidden]: it adds the tables' rows for the word, its position and token type 0, and normalizes.
class BertEmbeddingsImpl : public torch::nn::Module {
 public:
  explicit BertEmbeddingsImpl(const BertConfig& config)
      : words_(register_module("word_embeddings", torch::nn::Embedding(config.vocabulary, config.hidden))),
        positions_(register_module("position_embeddings", torch::nn::Embedding(config.positions, config.hidden))),
        token_types_(register_module("token_type_embeddings", torch::nn::Embedding(config.token_types, config.hidden))),
        norm_(register_module("LayerNorm", make_layer_norm(config))),
        dropout_(register_module("dropout", torch::nn::Dropout(config.dropout))) {}

  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor positions = at::arange(ids.size(1), ids.options());
    return dropout_(norm_(words_(ids) + token_types_(at::zeros_like(ids)) + positions_(positions)));
  }

 private:
  torch::nn::Embedding words_;
  torch::nn::Embedding positions_;
  torch::nn::Embedding token_types_;
  torch::nn::LayerNorm norm_;
  torch::nn::Dropout dropout_;
};
TORCH_MODULE(BertEmbeddings);

// x [b, t, hidden] -> [b, t, hidden]. `bias` [b, 1, 1, t] is added to every row of scores.
class BertSelfAttentionImpl : public torch::nn::Module {
 public:
  explicit BertSelfAttentionImpl(const BertConfig& config)
      : heads_(config.heads),
        dropout_(config.dropout),
        query_(register_module("query", torch::nn::Linear(config.hidden, config.hidden))),
        key_(register_module("key", torch::nn::Linear(config.hidden, config.hidden))),
        value_(register_module("value", torch::nn::Linear(config.hidden, config.hidden))) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) {
    const at::Tensor context = at::scaled_dot_product_attention(
        split_heads(query_(x)), split_heads(key_(x)), split_heads(value_(x)), bias, is_training() ? dropout_ : 0.0);
    return context.transpose(1, 2).reshape({x.size(0), x.size(1), x.size(2)});
  }

 private:
  // [b, t, hidden] -> [b, heads, t, hidden / heads]
  at::Tensor split_heads(const at::Tensor& x) const {
    const int64_t b = x.size(0), t = x.size(1), d = x.size(2) / heads_;
    return x.view({b, t, heads_, d}).transpose(1, 2);
  }

  int64_t heads_;
  double dropout_;
  torch::nn::Linear query_;
  torch::nn::Linear key_;
  torch::nn::Linear value_;
};
TORCH_MODULE(BertSelfAttention);

// Computes norm(residual + dense(x)), which follows both the attention and the feed-forward.
class BertOutputImpl : public torch::nn::Module {
 public:
  BertOutputImpl(const BertConfig& config, int64_t in_features)
      : dense_(register_module("dense", torch::nn::Linear(in_features, config.hidden))),
        norm_(register_module("LayerNorm", make_layer_norm(config))),
        dropout_(register_module("dropout", torch::nn::Dropout(config.dropout))) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual) { return norm_(dropout_(dense_(x)) + residual); }

 private:
  torch::nn::Linear dense_;
  torch::nn::LayerNorm norm_;
  torch::nn::Dropout dropout_;
};
TORCH_MODULE(BertOutput);

class BertAttentionImpl : public torch::nn::Module {
 public:
  explicit BertAttentionImpl(const BertConfig& config)
      : self_(register_module("self", BertSelfAttention(config))),
        output_(register_module("output", BertOutput(config, config.hidden))) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) { return output_(self_(x, bias), x); }

 private:
  BertSelfAttention self_;
  BertOutput output_;
};
TORCH_MODULE(BertAttention);

class BertIntermediateImpl : public torch::nn::Module {
 public:
  explicit BertIntermediateImpl(const BertConfig& config)
      : dense_(register_module("dense", torch::nn::Linear(config.hidden, config.intermediate))) {}

  at::Tensor forward(const at::Tensor& x) { return at::gelu(dense_(x)); }

 private:
  torch::nn::Linear dense_;
};
TORCH_MODULE(BertIntermediate);

class BertLayerImpl : public torch::nn::Module {
 public:
  explicit BertLayerImpl(const BertConfig& config)
      : attention_(register_module("attention", BertAttention(config))),
        intermediate_(register_module("intermediate", BertIntermediate(config))),
        output_(register_module("output", BertOutput(config, config.intermediate))) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) {
    const at::Tensor attended = attention_(x, bias);
    return output_(intermediate_(attended), attended);
  }

 private:
  BertAttention attention_;
  BertIntermediate intermediate_;
  BertOutput output_;
};
TORCH_MODULE(BertLayer);

class BertEncoderImpl : public torch::nn::Module {
 public:
  explicit BertEncoderImpl(const BertConfig& config) : layers_(register_module("layer", torch::nn::ModuleList())) {
    for (int64_t i = 0; i < config.layers; ++i) layers_->push_back(BertLayer(config));
  }

  at::Tensor forward(at::Tensor x, const at::Tensor& bias) {
    for (const auto& layer : *layers_) x = layer->as<BertLayer>()->forward(x, bias);
    return x;
  }

 private:
  torch::nn::ModuleList layers_;
};
TORCH_MODULE(BertEncoder);

// ids [b, t] (int64) and mask [b, t] (1 for a token, 0 for padding) -> the last layer's states [b, t, hidden].
// The pooler of the published weights is omitted, since sentence vectors do not use it.
class BertModelImpl : public torch::nn::Module {
 public:
  explicit BertModelImpl(const BertConfig& config = {})
      : embeddings_(register_module("embeddings", BertEmbeddings(config))),
        encoder_(register_module("encoder", BertEncoder(config))) {}

  at::Tensor forward(const at::Tensor& ids, const at::Tensor& mask) {
    const at::Tensor x = embeddings_(ids);
    const at::Tensor padding = 1 - mask.to(x.scalar_type());
    return encoder_(x, padding.view({ids.size(0), 1, 1, ids.size(1)}) * std::numeric_limits<float>::lowest());
  }

 private:
  BertEmbeddings embeddings_;
  BertEncoder encoder_;
};
TORCH_MODULE(BertModel);

// Returns one vector of length 1 per sentence: the normalized mean of `states` [b, t, hidden] over the tokens that
// `mask` [b, t] keeps.
inline at::Tensor sentence_vectors(const at::Tensor& states, const at::Tensor& mask) {
  const at::Tensor kept = mask.unsqueeze(-1).to(states.scalar_type());
  const at::Tensor mean = (states * kept).sum(1) / kept.sum(1).clamp_min(1e-9);
  return mean / mean.norm(2, -1, true).clamp_min(1e-12);
}

}  // namespace embed
