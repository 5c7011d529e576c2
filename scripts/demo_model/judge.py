#!/usr/bin/env python3
"""Evaluates a checkpoint by greedy generation: the share of correct answers to questions outside its corpus, and sample texts.

Needs torch and transformers.
"""

import argparse
from pathlib import Path
from random import Random

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import questions

PROMPTS = ["Once upon a time", "Once upon a time there was a little robot named Zed.", "Tell me a story about a brave cat.", "Q: Tell me a story about a fox named Ruby.\nA:", "One morning, the captain",
           "Q: What is the capital of France?\nA:", "What is the opposite of hot?", "Q: Who are you?\nA:", "Q: What is Kubernetes?\nA:", "The quick brown fox", "Long ago, in a far land,", "Hello", "What is Triton Inference Server?",
           "Q: Which is bigger, a mouse or an elephant?\nA:", "Q: Peter has a green boat. Paula has a red lamp. What does Paula have?\nA:", "The ship", "In the morning, Anna", "Once upon a time there was a lonely bear named Bo.", "Once upon a time there was a curious girl named Nina.", "Tell me a story about a lonely dragon named Kim.", "What is 7 plus 8?", "Q: What is a trireme?\nA:"]


@torch.inference_mode()
def complete(model, tokenizer, prompts: list[str], max_tokens: int, device: str) -> list[tuple[str, bool]]:
    """The text after each prompt, and whether it ended with the end token."""
    tokenizer.padding_side = "left"
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(device)
    outputs = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)[:, inputs.input_ids.shape[1]:]
    return [(tokenizer.decode(ids, skip_special_tokens=True), tokenizer.eos_token_id in ids.tolist()) for ids in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--questions", type=int, default=64, help="questions of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = LlamaForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.bfloat16).to(device).eval()
    rng = Random(99)
    for function, _ in questions.KINDS:
        if function is questions.asked_story:
            continue
        held = any(function(rng)[2] for _ in range(500))
        asked = [questions.ask_held_out(rng, function) if held else questions.ask(rng, [function]) for _ in range(arguments.questions)]
        answers = complete(model, tokenizer, [f"Q: {question}\nA:" for question, _ in asked], 40, device)
        right = [answer.strip() == expected for (answer, _), (_, expected) in zip(answers, asked)]
        print(f"{function.__name__:13} {'unseen' if held else 'seen  '} {sum(right)} of {len(right)} right")
        for ok, (question, expected), (answer, _) in [row for row in zip(right, asked, answers) if not row[0]][:2]:
            print(f"    {question!r}: {answer!r}, expected {expected!r}")
    for prompt in PROMPTS:
        [(text, ended)] = complete(model, tokenizer, [prompt], 300, device)
        print(f"--- {prompt!r} ({'ended' if ended else 'did not end'})\n{text}")


if __name__ == "__main__":
    main()
