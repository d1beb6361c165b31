#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/examples/language_model/transformer_options.h"

// A causal language model in plain torch::nn, which knows nothing of meshes. Its forward runs as it is on plain tensors
// and on DTensors, whose sizes are global: `heads` counts the heads of all ranks together.

// Holds one layer's keys or values of all positions so far, [batch, heads, sequence, head_size] from the first call on.
// Their memory is as the heads are cut: a rank that computes some heads holds the keys and values of these alone.
struct CachedPositions {
  at::Tensor all;

  // Writes `fresh`, [batch, heads, n, head_size], at positions begin, ..., begin + n - 1, and returns a view of the
  // positions before begin + n. Memory for `sequence` positions is made once.
  at::Tensor append(const at::Tensor& fresh, int64_t begin, int64_t sequence) {
    const int64_t end = begin + fresh.size(2);
    if (all.defined()) {
      all.narrow(2, begin, fresh.size(2)).copy_(fresh);
    } else {
      all = at::constant_pad_nd(fresh, {0, 0, 0, sequence - end});
    }
    return all.narrow(2, 0, end);
  }
};

struct LayerCache {
  CachedPositions keys, values;
};

// Holds what a model keeps of the tokens that it was given, so that the next call takes the tokens that follow alone:
//   KeyValueCache cache;
//   model(prompt, &cache);         // logits of all positions of the prompt
//   model(next_token, &cache);     // logits of position cache.length - 1
// It is for calls without gradients, all of one batch size. To begin another text set `length` to 0; a smaller length
// forgets the positions after it.
struct KeyValueCache {
  std::vector<LayerCache> layers;
  int64_t length = 0;  // positions so far
};

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const TransformerOptions& options)
      : heads(options.heads), sequence(options.sequence), dropout(options.dropout) {
    wq = register_module("wq", torch::nn::Linear(options.hidden, options.hidden));
    wk = register_module("wk", torch::nn::Linear(options.hidden, options.hidden));
    wv = register_module("wv", torch::nn::Linear(options.hidden, options.hidden));
    wo = register_module("wo", torch::nn::Linear(options.hidden, options.hidden));
    drop = register_module("drop", torch::nn::Dropout(options.dropout));
  }

  // [batch, length, hidden] -> [batch, length, hidden]. `begin` is the position of the first of `length`; `cache` holds
  // the positions before it.
  at::Tensor forward(const at::Tensor& x, LayerCache* cache = nullptr, int64_t begin = 0) {
    const auto by_head = [&](const at::Tensor& t) { return t.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2); };
    const at::Tensor q = by_head(wq(x));
    at::Tensor k = by_head(wk(x)), v = by_head(wv(x));
    if (cache != nullptr) {
      k = cache->keys.append(k, begin, sequence);
      v = cache->values.append(v, begin, sequence);
    }
    const at::Tensor y =
        at::scaled_dot_product_attention(q, k, v, earlier_positions(x, begin),
                                         /*dropout_p=*/is_training() ? dropout : 0.0, /*is_causal=*/begin == 0);
    return drop(wo(y.transpose(1, 2).flatten(2)));
  }

  // Returns the mask [length, begin + length] of the positions that each position of x may look at. No mask is needed
  // where x has all positions from 0 on, or one alone.
  static std::optional<at::Tensor> earlier_positions(const at::Tensor& x, int64_t begin) {
    const int64_t length = x.size(1);
    if (begin == 0 || length == 1) return std::nullopt;
    return torch::ones({length, begin + length}, torch::dtype(torch::kBool).device(x.device())).tril(begin);
  }

  int64_t heads;
  int64_t sequence;
  double dropout;
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const TransformerOptions& options) : gelu(options.gelu) {
    up = register_module("up", torch::nn::Linear(options.hidden, 4 * options.hidden));
    down = register_module("down", torch::nn::Linear(4 * options.hidden, options.hidden));
    drop = register_module("drop", torch::nn::Dropout(options.dropout));
  }

  at::Tensor forward(const at::Tensor& x) { return drop(down(torch::gelu(up(x), gelu))); }

  std::string gelu;
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

  at::Tensor forward(const at::Tensor& x, LayerCache* cache = nullptr, int64_t begin = 0) {
    const at::Tensor h = x + attn(norm1(x), cache, begin);
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
    // GPT-2 takes 0.02 for 1024 features. With few features a model that begins so learns nothing for hundreds of
    // steps.
    const double deviation = 0.64 / std::sqrt(static_cast<double>(options.hidden));
    for (const auto& each : named_parameters()) {
      if (each.value().dim() >= 2) each.value().normal_(0.0, deviation);
    }
  }

  // [batch, length] -> [batch, length, vocabulary]. With a cache, ids are those that follow the tokens that it has
  // seen, and it has seen them after this call.
  at::Tensor forward(const at::Tensor& ids, KeyValueCache* cache = nullptr) {
    const int64_t begin = cache == nullptr ? 0 : cache->length, end = begin + ids.size(1);
    if (end > options.sequence) {
      throw std::invalid_argument("the model takes " + std::to_string(options.sequence) + " positions, and was given " +
                                  std::to_string(end) + "; give fewer tokens, or set the length of the cache to 0");
    }
    if (cache != nullptr) cache->layers.resize(layers->size());
    at::Tensor x = drop(tok(ids) + pos(torch::arange(begin, end, ids.options().dtype(torch::kLong))));
    for (std::size_t i = 0; i < layers->size(); ++i) {
      x = layers->at<BlockImpl>(i).forward(x, cache == nullptr ? nullptr : &cache->layers[i], begin);
    }
    if (cache != nullptr) cache->length = end;
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
