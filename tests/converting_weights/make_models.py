"""Writes tiny models of transformers with random weights in float64, for transformers_test.

    make_models.py FOLDER    writes FOLDER/gpt2, FOLDER/llama and FOLDER/scaled_llama, each by save_pretrained, and in
                             each of them reference.safetensors with `ids` and the `logits` that the model gives for
                             them
"""

import pathlib
import sys

import safetensors.torch
import torch
import transformers


def write(model, folder, length=7):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model = model.double().eval()
    model.save_pretrained(folder, safe_serialization=True)
    ids = torch.randint(0, model.config.vocab_size, (2, length))
    with torch.no_grad():
        logits = model(ids).logits
    safetensors.torch.save_file({"ids": ids, "logits": logits}, folder / "reference.safetensors")


def main():
    folder = pathlib.Path(sys.argv[1])
    gpt2 = transformers.GPT2Config(
        vocab_size=11, n_embd=12, n_layer=2, n_head=6, n_positions=7, activation_function="gelu_new"
    )
    write(transformers.GPT2LMHeadModel(gpt2), folder / "gpt2")
    llama = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=7,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    write(transformers.LlamaForCausalLM(llama), folder / "llama")
    # One of the four speeds of a head of 8 elements is kept, one is between, and two are slowed by the whole factor.
    scaled = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        rope_theta=500.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    write(transformers.LlamaForCausalLM(scaled), folder / "scaled_llama", 40)


main()
