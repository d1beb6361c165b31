#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include <torch/torch.h>

// Computes GPT-2 and Llama as Python's transformers does, from tensors with its names and shapes alone: what modules
// with converted weights are compared with. Random values are equal on every rank.
namespace tessera::testing {

using NamedValues = std::map<std::string, at::Tensor>;

struct Sizes {
  int64_t vocabulary = 11, hidden = 24, intermediate = 10, layers = 2, heads = 6, key_value_heads = 3, sequence = 7;
};

inline at::Tensor random_value(at::IntArrayRef shape) { return torch::randn(shape, torch::kDouble) * 0.3; }

inline NamedValues gpt2_values(const Sizes& sizes, const std::string& prefix) {
  torch::manual_seed(1);
  NamedValues all = {{prefix + "wte.weight", random_value({sizes.vocabulary, sizes.hidden})},
                     {prefix + "wpe.weight", random_value({sizes.sequence, sizes.hidden})},
                     {prefix + "ln_f.weight", random_value({sizes.hidden})},
                     {prefix + "ln_f.bias", random_value({sizes.hidden})}};
  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string layer = prefix + "h." + std::to_string(i) + ".";
    const auto conv1d = [&](const std::string& name, int64_t in, int64_t out) {
      all[layer + name + ".weight"] = random_value({in, out});
      all[layer + name + ".bias"] = random_value({out});
    };
    for (const char* const norm : {"ln_1", "ln_2"}) {
      all[layer + norm + ".weight"] = random_value({sizes.hidden});
      all[layer + norm + ".bias"] = random_value({sizes.hidden});
    }
    conv1d("attn.c_attn", sizes.hidden, 3 * sizes.hidden);
    conv1d("attn.c_proj", sizes.hidden, sizes.hidden);
    conv1d("mlp.c_fc", sizes.hidden, 4 * sizes.hidden);
    conv1d("mlp.c_proj", 4 * sizes.hidden, sizes.hidden);
    all[layer + "attn.bias"] = torch::ones({1, 1, 2, 2}, torch::kBool);  // a mask, as older files have
  }
  return all;
}

// [batch, heads, length, head], heads of queries alone counting
inline at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t length = q.size(2);
  const at::Tensor scores = q.matmul(k.transpose(-1, -2)) / std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor later = torch::ones({length, length}, torch::kBool).triu(1);
  const at::Tensor mixed = scores.masked_fill(later, -INFINITY).softmax(-1).matmul(v);
  return mixed.transpose(1, 2).flatten(2);
}

inline at::Tensor split_heads(const at::Tensor& x, int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
}

// Computes the activation that transformers calls gelu_new.
inline at::Tensor gelu_new(const at::Tensor& x) {
  return 0.5 * x * (1 + torch::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x.pow(3))));
}

inline at::Tensor gpt2_logits(const NamedValues& all, const Sizes& sizes, const std::string& prefix,
                              const at::Tensor& ids, const std::function<at::Tensor(const at::Tensor&)>& gelu) {
  const auto get = [&](const std::string& name) { return all.at(prefix + name); };
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return torch::layer_norm(x, {sizes.hidden}, get(name + ".weight"), get(name + ".bias"));
  };
  const auto conv1d = [&](const at::Tensor& x, const std::string& name) {
    return x.matmul(get(name + ".weight")) + get(name + ".bias");
  };
  at::Tensor x = get("wte.weight").index({ids}) + get("wpe.weight").slice(0, 0, ids.size(1));
  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string layer = "h." + std::to_string(i) + ".";
    const std::vector<at::Tensor> qkv = conv1d(norm(x, layer + "ln_1"), layer + "attn.c_attn").split(sizes.hidden, 2);
    const at::Tensor mixed = causal_attention(split_heads(qkv[0], sizes.heads), split_heads(qkv[1], sizes.heads),
                                              split_heads(qkv[2], sizes.heads));
    x = x + conv1d(mixed, layer + "attn.c_proj");
    x = x + conv1d(gelu(conv1d(norm(x, layer + "ln_2"), layer + "mlp.c_fc")), layer + "mlp.c_proj");
  }
  return norm(x, "ln_f").matmul(get("wte.weight").t());
}

inline NamedValues llama_values(const Sizes& sizes, bool own_output) {
  torch::manual_seed(2);
  const int64_t few = sizes.hidden / sizes.heads * sizes.key_value_heads;
  NamedValues all = {{"model.embed_tokens.weight", random_value({sizes.vocabulary, sizes.hidden})},
                     {"model.norm.weight", random_value({sizes.hidden})}};
  if (own_output) all["lm_head.weight"] = random_value({sizes.vocabulary, sizes.hidden});
  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    all[layer + "input_layernorm.weight"] = random_value({sizes.hidden});
    all[layer + "post_attention_layernorm.weight"] = random_value({sizes.hidden});
    all[layer + "self_attn.q_proj.weight"] = random_value({sizes.hidden, sizes.hidden});
    all[layer + "self_attn.k_proj.weight"] = random_value({few, sizes.hidden});
    all[layer + "self_attn.v_proj.weight"] = random_value({few, sizes.hidden});
    all[layer + "self_attn.o_proj.weight"] = random_value({sizes.hidden, sizes.hidden});
    all[layer + "mlp.gate_proj.weight"] = random_value({sizes.intermediate, sizes.hidden});
    all[layer + "mlp.up_proj.weight"] = random_value({sizes.intermediate, sizes.hidden});
    all[layer + "mlp.down_proj.weight"] = random_value({sizes.hidden, sizes.intermediate});
    all[layer + "self_attn.rotary_emb.inv_freq"] = random_value({3});  // older files have it
  }
  return all;
}

// Rotates each element of a head's first half with the one of its second half.
inline at::Tensor rotated_halves(const at::Tensor& x) {
  const int64_t half = x.size(3) / 2;
  const at::Tensor speeds = torch::pow(10000.0, -torch::arange(half, torch::kDouble) / static_cast<double>(half));
  const at::Tensor angles = torch::outer(torch::arange(x.size(2), torch::kDouble), speeds);
  const at::Tensor both = torch::cat({angles, angles}, -1);
  const at::Tensor turned = torch::cat({-x.slice(-1, half), x.slice(-1, 0, half)}, -1);
  return x * both.cos() + turned * both.sin();
}

inline at::Tensor llama_logits(const NamedValues& all, const Sizes& sizes, const at::Tensor& ids) {
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return x * torch::rsqrt(x.square().mean(-1, true) + 1e-5) * all.at(name);
  };
  const auto linear = [&](const at::Tensor& x, const std::string& name) { return x.matmul(all.at(name).t()); };
  at::Tensor x = all.at("model.embed_tokens.weight").index({ids});
  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    const at::Tensor h = norm(x, layer + "input_layernorm.weight");
    const at::Tensor q = rotated_halves(split_heads(linear(h, layer + "self_attn.q_proj.weight"), sizes.heads));
    const at::Tensor k =
        rotated_halves(split_heads(linear(h, layer + "self_attn.k_proj.weight"), sizes.key_value_heads));
    const at::Tensor v = split_heads(linear(h, layer + "self_attn.v_proj.weight"), sizes.key_value_heads);
    const int64_t shared = sizes.heads / sizes.key_value_heads;
    x = x + linear(causal_attention(q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)),
                   layer + "self_attn.o_proj.weight");
    const at::Tensor f = norm(x, layer + "post_attention_layernorm.weight");
    x = x + linear(torch::silu(linear(f, layer + "mlp.gate_proj.weight")) * linear(f, layer + "mlp.up_proj.weight"),
                   layer + "mlp.down_proj.weight");
  }
  const bool own_output = all.count("lm_head.weight") > 0;
  return linear(norm(x, "model.norm.weight"), own_output ? "lm_head.weight" : "model.embed_tokens.weight");
}

}  // namespace tessera::testing
