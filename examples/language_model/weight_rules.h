#pragma once

#include <cstdint>
#include <string>

#include "tessera/dtensor/io/weight_rules.h"

// Says how files with the names of Python's transformers become the models beside this header, for
// tessera::load_weights. A program with modules of its own writes such a list for them.

// Is for Transformer, from the file of a GPT2LMHeadModel; `prefix` is "transformer." where that model's save_pretrained
// wrote it, and empty for the files called gpt2 to gpt2-xl. GPT-2 keeps a linear layer as [in, out], and queries, keys
// and values in one. Where the output does not have a weight of its own, it multiplies by the embedding's.
//
// Transformer computes GPT-2 exactly where TransformerOptions::gelu is what the file's "activation_function" names:
// "tanh" for "gelu_new", which the published models have, and "none" for "gelu".
inline tessera::WeightRules gpt2_rules(const std::string& prefix = "") {
  using tessera::from_file;
  const std::string layer = prefix + "h.*.";
  tessera::WeightRules all;
  all.rules = {
      {"tok.weight", from_file(prefix + "wte.weight")},
      {"pos.weight", from_file(prefix + "wpe.weight")},
      {"layers.*.norm1.*", from_file(layer + "ln_1.*")},
      {"layers.*.norm2.*", from_file(layer + "ln_2.*")},
      {"layers.*.attn.wo.weight", from_file(layer + "attn.c_proj.weight").transpose(0, 1)},
      {"layers.*.attn.wo.bias", from_file(layer + "attn.c_proj.bias")},
      {"layers.*.mlp.up.weight", from_file(layer + "mlp.c_fc.weight").transpose(0, 1)},
      {"layers.*.mlp.up.bias", from_file(layer + "mlp.c_fc.bias")},
      {"layers.*.mlp.down.weight", from_file(layer + "mlp.c_proj.weight").transpose(0, 1)},
      {"layers.*.mlp.down.bias", from_file(layer + "mlp.c_proj.bias")},
      {"norm.*", from_file(prefix + "ln_f.*")},
      {"head.weight", from_file("lm_head.weight")},
      {"head.weight", from_file(prefix + "wte.weight")},
  };
  int64_t part = 0;
  for (const char* const name : {"q", "k", "v"}) {
    const std::string module = std::string("layers.*.attn.w") + name;
    all.rules.push_back(
        {module + ".weight", from_file(layer + "attn.c_attn.weight").split(1, part, 3).transpose(0, 1)});
    all.rules.push_back({module + ".bias", from_file(layer + "attn.c_attn.bias").split(0, part, 3)});
    ++part;
  }
  all.ignored = {layer + "attn.bias", layer + "attn.masked_bias"};  // masks, which older files have
  return all;
}

// Is for Llama, from the file of a LlamaForCausalLM. transformers rotates each element of a head's first half with the
// one of its second half; Llama rotates neighbours, as the model was published. So the rows of queries and keys change
// their order within each head.
inline tessera::WeightRules llama_rules(int64_t heads, int64_t key_value_heads) {
  using tessera::from_file;
  const auto neighbours = [](const std::string& name, int64_t count) {
    return from_file("model.layers.*.self_attn." + name).unflatten(0, {count, 2, -1}).transpose(1, 2).flatten(0, 2);
  };
  return {.rules =
              {
                  {"tok.weight", from_file("model.embed_tokens.weight")},
                  {"layers.*.norm1.weight", from_file("model.layers.*.input_layernorm.weight")},
                  {"layers.*.norm2.weight", from_file("model.layers.*.post_attention_layernorm.weight")},
                  {"layers.*.attn.wq.weight", neighbours("q_proj.weight", heads)},
                  {"layers.*.attn.wk.weight", neighbours("k_proj.weight", key_value_heads)},
                  {"layers.*.attn.w?.weight", from_file("model.layers.*.self_attn.?_proj.weight")},  // wv and wo
                  {"layers.*.mlp.w1.weight", from_file("model.layers.*.mlp.gate_proj.weight")},
                  {"layers.*.mlp.w2.weight", from_file("model.layers.*.mlp.down_proj.weight")},
                  {"layers.*.mlp.w3.weight", from_file("model.layers.*.mlp.up_proj.weight")},
                  {"norm.weight", from_file("model.norm.weight")},
                  {"head.weight", from_file("lm_head.weight")},
                  {"head.weight", from_file("model.embed_tokens.weight")},
              },
          .ignored = {"model.layers.*.self_attn.rotary_emb.inv_freq"}};
}
