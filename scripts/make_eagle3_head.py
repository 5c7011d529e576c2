#!/usr/bin/env python3
"""Writes an EAGLE-3 head with random bf16 weights for a checkpoint, for tests on a GPU.

    make_eagle3_head.py CHECKPOINT OUT_DIR [--form specforge|speculators|fc_norm|norm_before_fc] [--seed N]

The head has the width, the heads and the inner layer of a Llama that is as wide as the model, and guesses a fourth of the tokens. specforge
has a `midlayer` and uses the model's embeddings and the usual layers; speculators has `layers.0`, embeddings of its own, other layers and
`norm_before_residual`. The others are of EAGLE-3.1: fc_norm has the form of specforge and takes four layers, whose outputs `eagle_config`
names, with a norm of each; norm_before_fc has the form of speculators and one norm of all layers. Needs torch and safetensors.
"""
import argparse
import json
import pathlib
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import torch
from safetensors.torch import save_file

DIM, GROUP = 64, 4  # numbers of a head, and query heads of a KV head


def tensors_of(name, width, vocab, has_embedding, form):
    """The weights of a head but `d2t`, as random numbers."""
    num_taps = 4 if form == "fc_norm" else 3
    heads, inner, count = width // DIM, 2 * width, vocab // 4
    matrix = lambda rows, cols, gain=1.0: torch.randn(rows, cols) * gain * cols ** -0.5
    norm = lambda cols=width, spread=0.2: 1 + spread * torch.randn(cols)
    found = {"fc.weight": matrix(width, num_taps * width), "norm.weight": norm(), "lm_head.weight": matrix(count, width, 4.0)}
    found |= {f"{name}.{norm_name}.weight": norm() for norm_name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    for part, rows in (("q", heads * DIM), ("k", heads // GROUP * DIM), ("v", heads // GROUP * DIM)):
        found[f"{name}.self_attn.{part}_proj.weight"] = matrix(rows, 2 * width)
    found[f"{name}.self_attn.o_proj.weight"] = matrix(width, heads * DIM)
    found |= {f"{name}.mlp.{part}_proj.weight": matrix(inner, width) for part in ("gate", "up")}
    found[f"{name}.mlp.down_proj.weight"] = matrix(width, inner)
    if has_embedding:
        found["embed_tokens.weight"] = torch.randn(vocab, width)
    if form == "fc_norm":
        found |= {f"fc_norm.{index}.weight": norm(spread=0.5) for index in range(num_taps)}
    elif form == "norm_before_fc":
        found["input_norm.weight"] = norm(num_taps * width, 0.5)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--form", choices=["specforge", "speculators", "fc_norm", "norm_before_fc"], default="specforge")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = json.loads((arguments.checkpoint / "config.json").read_text())
    model = model.get("text_config", model)
    width, vocab, layers = (model[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    form = arguments.form
    is_specforge = form in ("specforge", "fc_norm")
    tensors = tensors_of("midlayer" if is_specforge else "layers.0", width, vocab, not is_specforge, form)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    ids = torch.randperm(vocab)[:vocab // 4].sort().values
    tensors["d2t"] = ids - torch.arange(len(ids))
    layer = dict(vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_attention_heads=width // DIM,
                 num_key_value_heads=width // DIM // GROUP, head_dim=DIM, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0,
                 max_position_embeddings=model["max_position_embeddings"], attention_bias=False, model_type="llama", num_hidden_layers=1)
    config = {"draft_vocab_size": len(ids)}
    if is_specforge:
        config |= layer | dict(architectures=["LlamaForCausalLMEagle3"], tie_word_embeddings=False, torch_dtype="bfloat16")
    else:
        config |= dict(architectures=["Eagle3Speculator"], speculators_model_type="eagle3", torch_dtype="bfloat16", norm_before_residual=True,
                       eagle_aux_hidden_state_layer_ids=[0, layers // 2, layers - 1], transformer_layer_config=layer)
    if form in ("fc_norm", "norm_before_fc"):
        config |= {form: True, "norm_output": True}
    if form == "fc_norm":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 3, layers - 2], "use_aux_hidden_state": True}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, arguments.out / "model.safetensors", metadata={"format": "pt"})
    print(f"{arguments.out}: {sum(tensor.numel() for tensor in tensors.values()) / 1e6:.0f} million parameters")


main()
