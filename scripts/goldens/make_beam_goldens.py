#!/usr/bin/env python3
"""Writes tests/goldens/beam_search.json: beam searches of transformers, in fp32, on the demo checkpoint.

Usage: make_beam_goldens.py CHECKPOINT > tests/goldens/beam_search.json   (needs torch and transformers)
       make_beam_goldens.py CHECKPOINT --kv-cache > tests/goldens/beam_search_kv_cache.json

With --kv-cache, some searches whose keys and values are rounded to 8 bits (`make_kv_cache_goldens.py`).
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_kv_cache_goldens import LARGEST, RoundedCache

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
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help") or sys.argv[2:] not in ([], ["--kv-cache"]):
        sys.exit(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    goldens = []
    for form in LARGEST if sys.argv[2:] else [None]:
        # Rounded keys and values need few searches.
        for prompt in PROMPTS[1:] if form else PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            goldens += [search(model, ids, case, form) for case in (CASES[1:3] if form else CASES)]
    print("[\n" + ",\n".join(json.dumps(golden) for golden in goldens) + "\n]")


def search(model, ids, case, form):
    width, len_penalty, early_stopping, max_tokens, more = case
    cache = {"past_key_values": RoundedCache(form, model.config)} if form else {}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width,
                         length_penalty=len_penalty, early_stopping=early_stopping, max_new_tokens=max_tokens,
                         do_sample=False, return_dict_in_generate=True, output_scores=True, **cache, **more)
    beams = []
    for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        tokens = sequence[ids.shape[1]:]
        ended = model.config.eos_token_id in tokens
        tokens = tokens[:tokens.index(model.config.eos_token_id)] if ended else tokens
        beams.append({"tokens": tokens, "log_prob": score * (len(tokens) + ended) ** len_penalty})
    return ({"kv_cache": form} if form else {}) | {
        "prompt": ids[0].tolist(), "beam_width": width, "len_penalty": len_penalty, "early_stopping": early_stopping,
        "max_tokens": max_tokens, **more, "beams": beams}


if __name__ == "__main__":
    main()
