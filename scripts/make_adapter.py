#!/usr/bin/env python3
"""Makes a random LoRA adapter of a checkpoint, in the files that PEFT saves.

    make_adapter.py CHECKPOINT DIR [--rank N] [--seed N] [--scale S] [--modules NAME,NAME...]

The adapter has products of all linear layers of attention and feed-forward, or of those with the given names. Their factor S
is 1.5 by default, which makes them about a tenth as large as the outputs of the layers. Needs torch and transformers, but not peft.
"""
import argparse
import json
import pathlib
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.5)
    parser.add_argument("--modules", default="")
    args = parser.parse_args()
    wanted = [name for name in args.modules.split(",") if name]
    reference = args.checkpoint / "reference"  # quantized weights in fp32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(reference if reference.is_dir() else args.checkpoint))
    random = torch.Generator().manual_seed(args.seed)
    tensors = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear) or "layers." not in name or wanted and name.split(".")[-1] not in wanted:
            continue
        rows, cols = layer.weight.shape
        draw = lambda *shape: torch.randn(shape, generator=random)
        a, b = draw(args.rank, cols) / cols**0.5, 0.1 * draw(rows, args.rank) / args.rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    names = sorted({key.split(".lora_")[0].split(".")[-1] for key in tensors})
    args.dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.dir / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": args.rank, "lora_alpha": args.scale * args.rank, "bias": "none", "target_modules": names}
    (args.dir / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{args.dir}: rank {args.rank}, {len(tensors) // 2} products of {', '.join(names)}")


main()
