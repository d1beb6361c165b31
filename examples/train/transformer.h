#pragma once

#include <cstdint>
#include <optional>

#include <torch/torch.h>

// A causal transformer in plain torch::nn, which knows nothing of meshes. Its forward runs as it is on plain tensors
// and on DTensors, whose sizes are global: kHeads counts the heads of all ranks together.

constexpr int64_t kVocabulary = 64, kLength = 16, kDim = 32, kHeads = 4, kHidden = 128, kLayers = 2;

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(double dropout) {
    wq = register_module("wq", torch::nn::Linear(kDim, kDim));
    wk = register_module("wk", torch::nn::Linear(kDim, kDim));
    wv = register_module("wv", torch::nn::Linear(kDim, kDim));
    wo = register_module("wo", torch::nn::Linear(kDim, kDim));
    drop = register_module("drop", torch::nn::Dropout(dropout));
  }

  at::Tensor forward(const at::Tensor& x) {  // [batch, length, kDim] -> [batch, length, kDim]
    const auto heads = [&](const at::Tensor& t) { return t.view({x.size(0), x.size(1), kHeads, -1}).transpose(1, 2); };
    const at::Tensor y =
        at::scaled_dot_product_attention(heads(wq(x)), heads(wk(x)), heads(wv(x)), /*attn_mask=*/std::nullopt,
                                         /*dropout_p=*/0.0, /*is_causal=*/true);
    return drop(wo(y.transpose(1, 2).flatten(2)));
  }

  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(double dropout) {
    up = register_module("up", torch::nn::Linear(kDim, kHidden));
    down = register_module("down", torch::nn::Linear(kHidden, kDim));
    drop = register_module("drop", torch::nn::Dropout(dropout));
  }

  at::Tensor forward(const at::Tensor& x) { return drop(down(torch::gelu(up(x)))); }

  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Mlp);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double dropout) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    attn = register_module("attn", Attention(dropout));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    mlp = register_module("mlp", Mlp(dropout));
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
  explicit TransformerImpl(double dropout) {
    tok = register_module("tok", torch::nn::Embedding(kVocabulary, kDim));
    pos = register_module("pos", torch::nn::Embedding(kLength, kDim));
    layers = register_module("layers", torch::nn::Sequential());
    for (int64_t i = 0; i < kLayers; ++i) layers->push_back(Block(dropout));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kDim, kVocabulary).bias(false)));
  }

  at::Tensor forward(const at::Tensor& ids) {  // [batch, length] -> [batch, length, kVocabulary]
    const at::Tensor x = tok(ids) + pos(torch::arange(ids.size(1)));
    return head(norm(layers->forward(x)));
  }

  torch::nn::Embedding tok{nullptr}, pos{nullptr};
  torch::nn::Sequential layers{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Transformer);
