#pragma once

#include <cstdint>
#include <numbers>
#include <optional>
#include <utility>

#include <torch/torch.h>

// Llama in plain torch::nn, with fewer heads for keys and values than for queries where `key_value_heads` says so.
// Positions are rotations of queries and keys (RoPE), of each pair of neighbouring elements of a head.
// Source of the architecture: "LLaMA: Open and Efficient Foundation Language Models" (arXiv 2302.13971), section 2.2.

// Slows the rotations that make fewer than `high` turns in `length` tokens, by `factor` where they make fewer than
// `low`, for texts that are longer than those of the first training: Llama 3.1 and 3.2 do. In a config.json of
// transformers it is "rope_scaling", of "rope_type" "llama3".
// Source of the formula: Meta's llama-models, models/llama3/model.py, apply_scaling.
struct LlamaRotaryScaling {
  double factor = 8.0;           // "factor"
  double low = 1.0, high = 4.0;  // "low_freq_factor" and "high_freq_factor"
  double length = 8192.0;        // "original_max_position_embeddings"

  friend bool operator==(const LlamaRotaryScaling&, const LlamaRotaryScaling&) = default;
};

struct LlamaOptions {
  int64_t vocabulary = 256;
  int64_t hidden = 64;
  int64_t intermediate = 172;
  int64_t layers = 2;
  int64_t heads = 4;             // divides `hidden`; a head has an even number of elements
  int64_t key_value_heads = 2;   // divides `heads`
  double rotary_base = 10000.0;  // "rope_theta" in a config.json of transformers
  std::optional<LlamaRotaryScaling> rotary_scaling = {};
  double norm_epsilon = 1e-5;  // "rms_norm_eps"
  bool tied = false;           // "tie_word_embeddings": the output layer has the embedding's weight

  friend bool operator==(const LlamaOptions&, const LlamaOptions&) = default;
};

struct LlamaNormImpl : torch::nn::Module {
  explicit LlamaNormImpl(const LlamaOptions& options) : epsilon(options.norm_epsilon) {
    weight = register_parameter("weight", torch::ones({options.hidden}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::rms_norm(x, weight.sizes(), weight, epsilon); }

  double epsilon;
  at::Tensor weight;
};
TORCH_MODULE(LlamaNorm);

struct LlamaAttentionImpl : torch::nn::Module {
  explicit LlamaAttentionImpl(const LlamaOptions& options_) : options(options_) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
    };
    const int64_t head = options.hidden / options.heads, few = options.key_value_heads * head;
    wq = linear("wq", options.hidden, options.hidden);
    wk = linear("wk", options.hidden, few);
    wv = linear("wv", options.hidden, few);
    wo = linear("wo", options.hidden, options.hidden);
  }

  // Rotates x, [batch, heads, length, head], by angles of [length, head / 2].
  static at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
    const at::Tensor pairs = x.unflatten(-1, {-1, 2});
    const at::Tensor a = pairs.select(-1, 0), b = pairs.select(-1, 1);
    return torch::stack({a * cosines - b * sines, a * sines + b * cosines}, -1).flatten(-2);
  }

  at::Tensor forward(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
    const auto by_head = [](const at::Tensor& t, int64_t heads) {
      return t.unflatten(-1, {heads, -1}).transpose(1, 2);
    };
    const at::Tensor q = rotated(by_head(wq(x), options.heads), cosines, sines);
    const at::Tensor k = rotated(by_head(wk(x), options.key_value_heads), cosines, sines);
    const at::Tensor v = by_head(wv(x), options.key_value_heads);
    const int64_t shared = options.heads / options.key_value_heads;
    const at::Tensor y =
        at::scaled_dot_product_attention(q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1),
                                         /*attn_mask=*/std::nullopt, /*dropout_p=*/0.0, /*is_causal=*/true);
    return wo(y.transpose(1, 2).flatten(2));
  }

  LlamaOptions options;
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TORCH_MODULE(LlamaAttention);

struct LlamaMlpImpl : torch::nn::Module {
  explicit LlamaMlpImpl(const LlamaOptions& options) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
    };
    w1 = linear("w1", options.hidden, options.intermediate);
    w2 = linear("w2", options.intermediate, options.hidden);
    w3 = linear("w3", options.hidden, options.intermediate);
  }
  at::Tensor forward(const at::Tensor& x) { return w2(torch::silu(w1(x)) * w3(x)); }

  torch::nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};
};
TORCH_MODULE(LlamaMlp);

struct LlamaBlockImpl : torch::nn::Module {
  explicit LlamaBlockImpl(const LlamaOptions& options) {
    norm1 = register_module("norm1", LlamaNorm(options));
    attn = register_module("attn", LlamaAttention(options));
    norm2 = register_module("norm2", LlamaNorm(options));
    mlp = register_module("mlp", LlamaMlp(options));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
    const at::Tensor h = x + attn(norm1(x), cosines, sines);
    return h + mlp(norm2(h));
  }

  LlamaNorm norm1{nullptr}, norm2{nullptr};
  LlamaAttention attn{nullptr};
  LlamaMlp mlp{nullptr};
};
TORCH_MODULE(LlamaBlock);

struct LlamaImpl : torch::nn::Module {
  explicit LlamaImpl(const LlamaOptions& options_) : options(options_) {
    tok = register_module("tok", torch::nn::Embedding(options.vocabulary, options.hidden));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < options.layers; ++i) layers->push_back(LlamaBlock(options));
    norm = register_module("norm", LlamaNorm(options));
    head = register_module("head",
                           torch::nn::Linear(torch::nn::LinearOptions(options.hidden, options.vocabulary).bias(false)));
    if (options.tied) head->weight = tok->weight;
  }

  // Returns by how much each pair of a head's elements is rotated per token.
  at::Tensor speeds(const at::TensorOptions& plain) const {
    const int64_t half = options.hidden / options.heads / 2;
    const at::Tensor all = torch::pow(options.rotary_base, -torch::arange(half, plain) / static_cast<double>(half));
    if (!options.rotary_scaling) return all;
    const LlamaRotaryScaling& scaling = *options.rotary_scaling;
    const at::Tensor turns = all * (scaling.length / (2 * std::numbers::pi));
    const at::Tensor kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1);
    return all * (kept + (1 - kept) / scaling.factor);
  }

  // Returns the cosines and sines of the angles of `length` positions, [length, head / 2], in the dtype of `like`. They
  // are computed in float32 at least: 16 bits cannot tell late positions apart.
  std::pair<at::Tensor, at::Tensor> rotations(int64_t length, const at::TensorOptions& like) const {
    const at::ScalarType dtype = c10::typeMetaToScalarType(like.dtype());
    const at::TensorOptions plain = like.dtype(at::promote_types(dtype, at::kFloat));
    const at::Tensor angles = torch::outer(torch::arange(length, plain), speeds(plain));
    return {angles.cos().to(dtype), angles.sin().to(dtype)};
  }

  // [batch, length] -> [batch, length, vocabulary]
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = tok(ids);
    const auto [cosines, sines] = rotations(ids.size(1), ids.options().dtype(x.scalar_type()));
    for (const auto& layer : *layers) x = layer->as<LlamaBlock>()->forward(x, cosines, sines);
    return head(norm(x));
  }

  LlamaOptions options;
  torch::nn::Embedding tok{nullptr};
  torch::nn::ModuleList layers{nullptr};
  LlamaNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Llama);
