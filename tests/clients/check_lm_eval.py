#!/usr/bin/env python3
"""Checks a running server with the evaluation harness `lm-eval`: log likelihoods and generated answers, without a network.

Usage, with a server of this repository's `model_repository` on port 8000:

    python3 -m venv .cache/venv_lm_eval
    .cache/venv_lm_eval/bin/python -m pip install lm-eval==0.4.13 transformers==5.23.0 tenacity==9.2.1
    .cache/venv_lm_eval/bin/python tests/clients/check_lm_eval.py localhost:8000

The tests do not run it, because these packages (pyarrow, SciPy, scikit-learn, pandas, …) take 900 MB. They do not need PyTorch.
Prints one line for each check and returns 1 when one fails.

Log likelihoods of prompts sent as text (`tokenized_requests=False`) are not checked: `lm-eval` then counts the context's tokens without the BOS token
that a server adds to a text, or sends a second BOS token, so its scores differ from those of token ids on every server.
"""

import json
import math
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": tempfile.mkdtemp(prefix="lm_eval_")}

import lm_eval  # noqa: E402 (reads the variables above)
from lm_eval.tasks import TaskManager  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

TOKENIZER = Path(__file__).resolve().parents[2] / "model_repository/tensorrt_llm/1"
DOCUMENTS = [
    {"question": "What is the opposite of hot?", "choices": [" The opposite of hot is cold.", " The opposite of hot is tall."], "answer": 0},
    {"question": "What is the opposite of up?", "choices": [" The opposite of up is red.", " The opposite of up is down."], "answer": 1},
    {"question": "What is the opposite of day?", "choices": [" The opposite of day is night.", " The opposite of day is fast."], "answer": 0},
]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
doc_to_text: "Q: {{{{question}}}}\\nA:"
target_delimiter: ""
"""
CHOICES = COMMON + """
task: choices
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
ANSWERS = COMMON + """
task: answers
output_type: generate_until
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 16
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
PERPLEXITY = COMMON + """
task: perplexity
output_type: loglikelihood_rolling
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""


class Check:
    """Evaluates tasks on one server and counts failed checks."""

    def __init__(self, address: str, folder: Path):
        self.address, self.failed = address, 0
        documents = folder / "documents.jsonl"
        documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
        for name, text in (("choices", CHOICES), ("answers", ANSWERS), ("perplexity", PERPLEXITY)):
            (folder / f"{name}.yaml").write_text(text.format(file=documents))
        self.tasks = TaskManager(include_path=str(folder), include_defaults=False)

    def evaluate(self, model: str, task: str, arguments: str, **fields) -> tuple[dict, list]:
        """The metrics of a task and the model's answers to its requests."""
        path = "chat/completions" if model == "local-chat-completions" else "completions"
        model_args = f"model=ensemble,base_url=http://{self.address}/v1/{path},max_retries=1,{arguments}"
        found = lm_eval.simple_evaluate(model, model_args=model_args, tasks=[task], task_manager=self.tasks, log_samples=True, **fields)
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        return found["results"][task], [sample["filtered_resps"] for sample in samples]

    def check(self, name: str, test) -> None:
        try:
            test()
        except Exception as error:  # Every failure is reported, and the next check runs.
            self.failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:500]}")
        else:
            print(f"ok   {name}")

    def expected_choices(self, bos: bool) -> list[list[tuple[float, bool]]]:
        """The choices' log likelihoods, from the logits that Triton's endpoint returns."""
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        encode = lambda text: tokenizer.encode(text, add_special_tokens=bos)  # noqa: E731
        return [[self.likelihood(encode(context), encode(context + choice)) for choice in document["choices"]]
                for document in DOCUMENTS for context in [f"Q: {document['question']}\nA:"]]

    def likelihood(self, context: list[int], tokens: list[int]) -> tuple[float, bool]:
        body = {"input_ids": tokens, "input_lengths": len(tokens), "request_output_len": 1, "return_context_logits": True}
        request = urllib.request.Request(f"http://{self.address}/v2/models/tensorrt_llm/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            logits = json.load(answer)["context_logits"]
        width, total, greedy = len(logits) // len(tokens), 0.0, True
        for at in range(len(context), len(tokens)):
            row = logits[(at - 1) * width : at * width]
            largest = max(row)
            total += row[tokens[at]] - largest - math.log(sum(math.exp(value - largest) for value in row))
            greedy = greedy and row[tokens[at]] == largest
        return total, greedy

    def choices(self, arguments: str, bos: bool, **fields) -> None:
        metrics, found = self.evaluate("local-completions", "choices", arguments, **fields)
        for own, expected in zip(found, self.expected_choices(bos), strict=True):
            for (score, greedy), (wanted, wanted_greedy) in zip(own, expected, strict=True):
                assert math.isclose(score, wanted, abs_tol=2e-3) and greedy == wanted_greedy, (score, greedy, wanted, wanted_greedy)
        assert not bos or metrics["acc,none"] == 1.0, metrics

    def answers(self, model: str, arguments: str, **fields) -> None:
        metrics, found = self.evaluate(model, "answers", arguments, **fields)
        assert metrics["exact_match,none"] == 1.0, (metrics, found)

    def perplexity(self, arguments: str) -> None:
        metrics, _ = self.evaluate("local-completions", "perplexity", arguments)
        assert 1 < metrics["byte_perplexity,none"] < 1000, metrics

    def all(self) -> None:
        local = f"tokenizer={TOKENIZER},tokenizer_backend=huggingface,"
        self.check("log likelihoods of token ids", lambda: self.choices(local, bos=False))
        self.check("log likelihoods of token ids with a BOS token, concurrent", lambda: self.choices(local + "add_bos_token=True,num_concurrent=4", bos=True))
        self.check("log likelihoods of token ids in batches", lambda: self.choices(local + "add_bos_token=True", bos=True, batch_size=4))
        self.check("log likelihoods with the server's tokenizer", lambda: self.choices("tokenizer_backend=remote", bos=False))
        self.check("perplexity of texts", lambda: self.perplexity(local))
        self.check("completions of token ids", lambda: self.answers("local-completions", local + "add_bos_token=True", batch_size=3))
        self.check("completions of texts", lambda: self.answers("local-completions", "tokenizer_backend=None"))
        self.check("chats", lambda: self.answers("local-chat-completions", "num_concurrent=2", apply_chat_template=True))


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        check = Check(sys.argv[1], Path(folder))
        check.all()
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
