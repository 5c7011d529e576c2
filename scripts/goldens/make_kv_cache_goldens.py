#!/usr/bin/env python3
"""Logits of a tiny checkpoint whose keys and values are rounded to 8 bits, for src/models/tests/kv_cache.rs.

    pip install torch transformers==5.23.0
    python scripts/goldens/make_kv_cache_goldens.py

The reference is transformers in fp32, with a cache that rounds what is written to it: the elements of a token and KV head get one scale,
their largest size divided by the largest code. torch makes the codes.
"""
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, DynamicCache

# Its weights are in f32, so what is compared is not hidden by roundings of layers.
CASES = ["mha_bias_f32"]
SEQUENCES = 3
LARGEST = {"fp8": 448.0, "int8": 127.0}


def rounded(x, form):
    scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST[form]
    codes = x / torch.where(scale > 0, scale, 1.0)
    codes = codes.to(torch.float8_e4m3fn).to(x.dtype) if form == "fp8" else codes.round().clamp(-127, 127)
    return codes * scale


class RoundedCache(DynamicCache):
    def __init__(self, form, config):
        super().__init__(config=config)
        self.form = form

    def update(self, keys, values, *args, **options):
        return super().update(rounded(keys, self.form), rounded(values, self.form), *args, **options)


def main():
    goldens = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens"
    torch.set_num_threads(1)
    result = {}
    for case in CASES:
        model = AutoModelForCausalLM.from_pretrained(goldens / case, dtype=torch.float32, attn_implementation="eager").eval()
        sequences = json.loads((goldens / case / "golden.json").read_text())["sequences"][:SEQUENCES]
        result[case] = {}
        for form in LARGEST:
            logits = []
            for sequence in sequences:
                cache = RoundedCache(form, model.config)
                with torch.no_grad():
                    last = model(torch.tensor([sequence["prompt"]]), past_key_values=cache, use_cache=True).logits[0, -1]
                logits.append([float(f"{x:.6g}") for x in last.tolist()])
                plain = torch.tensor(sequence["logits"])
                print(f"{case} {form}: {len(sequence['prompt'])} tokens, differs from plain by {(last - plain).std() / plain.std():.4f}")
            result[case][form] = logits
    (goldens / "kv_cache.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
