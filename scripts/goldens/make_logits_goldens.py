#!/usr/bin/env python3
"""Writes tests/goldens/logits.json: greedy outputs of transformers in fp32 on the demo checkpoint, and raw logits.

Of each row of logits it keeps every 64th, the largest, the sum, and the sum of squares.

Usage: make_logits_goldens.py CHECKPOINT > tests/goldens/logits.json   (needs torch and transformers)
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["Once upon a time", "Tom and Lily went to the park. They saw a big dog. " * 8]
MAX_TOKENS = 8


def digest(row):
    row = row.double()
    return {"some": [round(x, 5) for x in row[::64].tolist()], "max": round(row.max().item(), 5),
            "sum": round(row.sum().item(), 3), "squares": round((row * row).sum().item(), 3)}


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    goldens = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
            logits = model(output).logits[0]
        num_prompt = ids.shape[1]
        goldens.append({"prompt": ids[0].tolist(), "output": output[0, num_prompt:].tolist(),
                        "context": [digest(row) for row in logits[:num_prompt]],
                        "generation": [digest(row) for row in logits[num_prompt - 1:-1]]})
    print("[\n" + ",\n".join(json.dumps(golden) for golden in goldens) + "\n]")


if __name__ == "__main__":
    main()
