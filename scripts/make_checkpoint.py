#!/usr/bin/env python3
"""Write a checkpoint of a Llama shape with random bf16 weights, for tests on a GPU.

    make_checkpoint.py SHAPE OUT_DIR [--layers N]        SHAPE: small, mha (Llama 2 7B's layer), gqa (Llama 3 8B's layer)

Needs torch and transformers.
"""
import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {  # hidden, inner, heads, KV heads, vocabulary, rope theta
    "small": (256, 704, 8, 4, 32000, 1e4),
    "mha": (4096, 11008, 32, 32, 32000, 1e4),
    "gqa": (4096, 14336, 32, 8, 128256, 5e5),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("shape", choices=SHAPES)
parser.add_argument("out")
parser.add_argument("--layers", type=int, default=4)
arguments = parser.parse_args()
hidden, inner, heads, kv_heads, vocab, theta = SHAPES[arguments.shape]
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        vocab_size=vocab, rope_theta=theta, num_hidden_layers=arguments.layers, max_position_embeddings=4096,
        tie_word_embeddings=False))
model.save_pretrained(arguments.out)
print(f"{arguments.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
