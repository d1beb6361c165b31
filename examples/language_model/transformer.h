#pragma once

#include <cmath>
#include <cstdint>
#include <memory>

#include <torch/torch.h>

// A causal language model in plain torch::nn, which knows nothing of meshes. Its forward runs as it is on plain tensors
// and on DTensors, whose sizes are global: `heads` counts the heads of all ranks together.

struct TransformerOptions {
  int64_t vocabulary = 256;  // bytes
  int64_t hidden = 128;
  int64_t layers = 4;
  int64_t heads = 4;       // divides `hidden`
  int64_t sequence = 128;  // the longest
  double dropout = 0.1;
  bool tied = false;  // the output multiplies by the embedding's weight

  friend bool operator==(const TransformerOptions&, const TransformerOptions&) = default;
};

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const TransformerOptions& options) : heads(options.heads), dropout(options.dropout) {
    wq = register_module("wq", torch::nn::Linear(options.hidden, options.hidden));
    wk = register_module("wk", torch::nn::Linear(options.hidden, options.hidden));
    wv = register_module("wv", torch::nn::Linear(options.hidden, options.hidden));
    wo = register_module("wo", torch::nn::Linear(options.hidden, options.hidden));
    drop = register_module("drop", torch::nn::Dropout(options.dropout));
  }

  at::Tensor forward(const at::Tensor& x) {  // [batch, length, hidden] -> [batch, length, hidden]
    const auto by_head = [&](const at::Tensor& t) { return t.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2); };
    const at::Tensor y =
        at::scaled_dot_product_attention(by_head(wq(x)), by_head(wk(x)), by_head(wv(x)), /*attn_mask=*/std::nullopt,
                                         /*dropout_p=*/is_training() ? dropout : 0.0, /*is_causal=*/true);
    return drop(wo(y.transpose(1, 2).flatten(2)));
  }

  int64_t heads;
  double dropout;
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const TransformerOptions& options) {
    up = register_module("up", torch::nn::Linear(options.hidden, 4 * options.hidden));
    down = register_module("down", torch::nn::Linear(4 * options.hidden, options.hidden));
    drop = register_module("drop", torch::nn::Dropout(options.dropout));
  }

  at::Tensor forward(const at::Tensor& x) { return drop(down(torch::gelu(up(x)))); }

  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Mlp);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const TransformerOptions& options) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.hidden})));
    attn = register_module("attn", Attention(options));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.hidden})));
    mlp = register_module("mlp", Mlp(options));
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + attn(norm1(x));
    return h + mlp(norm2(h));
  }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  Attention attn{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const TransformerOptions& options_) : options(options_) {
    tok = register_module("tok", torch::nn::Embedding(options.vocabulary, options.hidden));
    pos = register_module("pos", torch::nn::Embedding(options.sequence, options.hidden));
    drop = register_module("drop", torch::nn::Dropout(options.dropout));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < options.layers; ++i) layers->push_back(Block(options));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.hidden})));
    head = register_module("head",
                           torch::nn::Linear(torch::nn::LinearOptions(options.hidden, options.vocabulary).bias(false)));
    if (options.tied) head->weight = tok->weight;
    const torch::NoGradGuard no_gradient;
    // That of GPT-2, 0.02 for 1024 features, is too small for few: such a model learns nothing for hundreds of steps.
    const double deviation = 0.64 / std::sqrt(static_cast<double>(options.hidden));
    for (const auto& each : named_parameters()) {
      if (each.value().dim() >= 2) each.value().normal_(0.0, deviation);
    }
  }

  at::Tensor forward(const at::Tensor& ids) {  // [batch, length] -> [batch, length, vocabulary]
    at::Tensor x = drop(tok(ids) + pos(torch::arange(ids.size(1), ids.options().dtype(torch::kLong))));
    for (const auto& layer : *layers) x = layer->as<Block>()->forward(x);
    return head(norm(x));
  }

  TransformerOptions options;
  torch::nn::Embedding tok{nullptr}, pos{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Transformer);
