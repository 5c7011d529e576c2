#!/usr/bin/env python3
"""Writes tests/goldens/sampling.jsonl: results of transformers' logits processors on random logits.

Each case has settings with the names of engine::SamplingParams, the scores after all processors (null if a token is banned or
dropped), and the log-probabilities of the raw logits. Processors run in the order that engine::SamplingParams documents.

Usage: make_sampling_goldens.py > tests/goldens/sampling.jsonl   (needs torch and transformers)
"""
import json
import math
import sys

import torch
from transformers import generation as g

VOCAB = 64
PROMPT = [4, 9, 9, 31, 4, 60]
OUTPUT = [7, 9, 12, 7, 4]
END_IDS = [1, 40]
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.35},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_k": 9},
    {"temperature": 1.0, "top_k": 500},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 2.0, "min_p": 0.08},
    {"temperature": 1.0, "min_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 1.0, "logit_bias": [[3, 2.5], [7, -4.0], [63, 1.25]]},
    {"temperature": 1.0, "bad_words": [[5], [4, 9], [7, 4, 11], [9, 12], [60, 61]]},
    {"temperature": 1.0, "min_tokens": 6},
    {"temperature": 1.0, "min_tokens": 5},
    {"temperature": 1.1, "top_k": 25, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 9,
     "logit_bias": [[9, 1.0], [20, -1.0]], "bad_words": [[30], [4, 8]]},
]


def processors(case):
    yield g.RepetitionPenaltyLogitsProcessor(case.get("repetition_penalty", 1.0))
    if "logit_bias" in case:
        yield g.SequenceBiasLogitsProcessor({(token,): bias for token, bias in case["logit_bias"]})
    if "bad_words" in case:
        yield g.NoBadWordsLogitsProcessor(case["bad_words"])
    if "min_tokens" in case:
        yield g.MinNewTokensLengthLogitsProcessor(len(PROMPT), case["min_tokens"], END_IDS)
    yield g.TemperatureLogitsWarper(case["temperature"])
    if "top_k" in case:
        yield g.TopKLogitsWarper(case["top_k"])
    if "top_p" in case:
        yield g.TopPLogitsWarper(case["top_p"])
    if "min_p" in case:
        yield g.MinPLogitsWarper(case["min_p"])


def main():
    if len(sys.argv) != 1:
        sys.exit(__doc__)
    torch.manual_seed(11)
    ids = torch.tensor([PROMPT + OUTPUT])
    goldens = []
    for case in CASES:
        logits = (torch.randn(1, VOCAB) * 2.5 * 1024).round() / 1024
        scores = logits.clone()
        for processor in processors(case):
            scores = processor(ids, scores)
        kept = [None if math.isinf(x) else round(x, 6) for x in scores[0].tolist()]
        log_probs = [round(x, 6) for x in torch.log_softmax(logits[0].double(), -1).tolist()]
        goldens.append({"settings": case, "logits": logits[0].tolist(), "scores": kept, "log_probs": log_probs})
    print(json.dumps({"prompt": PROMPT, "output": OUTPUT, "end_ids": END_IDS}) + "\n"
          + "\n".join(json.dumps(golden) for golden in goldens))


if __name__ == "__main__":
    main()
