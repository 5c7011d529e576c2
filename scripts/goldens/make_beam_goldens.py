#!/usr/bin/env python3
"""Writes tests/goldens/beam_search.json: beam searches of transformers, in fp32, on the demo checkpoint.

Usage: make_beam_goldens.py CHECKPOINT > tests/goldens/beam_search.json   (needs torch and transformers)
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["Once upon a time", "The little dog was", "Tom and Lily went to the park. They"]
# Width, length penalty, early stopping, tokens, further settings by transformers' names.
CASES = [
    (2, 0.0, True, 12, {}),
    (4, 1.0, False, 24, {}),
    (5, 0.0, False, 40, {}),
    (3, 2.0, True, 60, {}),
    (4, 1.0, False, 20, {"repetition_penalty": 1.3}),
]


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    goldens = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        for width, len_penalty, early_stopping, max_tokens, more in CASES:
            out = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width,
                                 length_penalty=len_penalty, early_stopping=early_stopping, max_new_tokens=max_tokens,
                                 do_sample=False, return_dict_in_generate=True, output_scores=True, **more)
            beams = []
            for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
                tokens = sequence[ids.shape[1]:]
                ended = model.config.eos_token_id in tokens
                tokens = tokens[:tokens.index(model.config.eos_token_id)] if ended else tokens
                beams.append({"tokens": tokens, "log_prob": score * (len(tokens) + ended) ** len_penalty})
            goldens.append({"prompt": ids[0].tolist(), "beam_width": width, "len_penalty": len_penalty,
                            "early_stopping": early_stopping, "max_tokens": max_tokens, **more, "beams": beams})
    print("[\n" + ",\n".join(json.dumps(golden) for golden in goldens) + "\n]")


if __name__ == "__main__":
    main()
