#!/usr/bin/env python3
"""Compares beams, drafts, logits and decaying top-p of a server with transformers, for several tp and pp sizes.

    check_gpu_serving.py CHECKPOINT [--layouts 1x1 2x1 1x2 2x2] [--device cuda] [--bin DIR] [--port N]

A layout is `tp`x`pp`. For each one it starts `launch`, sends requests over HTTP, and compares with transformers in fp32. The allowed
error is derived from that of transformers' bf16. Prints one line per check; exits with 1 if one fails. Needs torch and transformers.
"""
import argparse
import json
import pathlib
import sys
import tempfile
import urllib.error
import urllib.request

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import torch
from serving_bench import Bench
from transformers import AutoModelForCausalLM

NUM_TOKENS = 24
PROMPTS = [[11, 250, 3, 77, 1009, 42, 5, 900], [7, 8, 9, 10] * 8, [400 + 13 * i for i in range(40)]]
WHERE = "cuda" if torch.cuda.is_available() else "cpu"


class Reference:
    """transformers in fp32, and the error of its bf16 against that."""

    def __init__(self, checkpoint):
        load = lambda dtype: AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(WHERE).eval()
        torch.backends.cuda.matmul.allow_tf32 = False
        self.exact, rounded = load(torch.float32), load(torch.bfloat16)
        errors = [self.log_probs(ids, rounded) - self.log_probs(ids) for ids in PROMPTS]
        errors = torch.cat([error.flatten() for error in errors])
        self.rms, self.worst = errors.pow(2).mean().sqrt().item(), errors.abs().max().item()

    @torch.no_grad()
    def log_probs(self, ids, model=None):
        return (model or self.exact)(torch.tensor([ids], device=WHERE)).logits[0].float().log_softmax(-1).cpu()

    def of_output(self, prompt, tokens):
        """Log-probabilities at the positions from which `tokens` were chosen."""
        return self.log_probs(prompt + tokens)[len(prompt) - 1:-1]

    def behind(self, prompt, tokens):
        """The maximum difference in log-probability between the likeliest token and the chosen one."""
        rows = self.of_output(prompt, tokens)
        return (rows.max(-1).values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max().item()

    @torch.no_grad()
    def best_beam(self, prompt, width):
        found = self.exact.generate(
            torch.tensor([prompt], device=WHERE), num_beams=width, max_new_tokens=NUM_TOKENS, do_sample=False, length_penalty=0.0,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
        tokens = found.sequences[0][len(prompt):].tolist()
        return self.of_output(prompt, tokens).gather(1, torch.tensor(tokens)[:, None]).sum().item()


class Check:
    def __init__(self, reference, port, name):
        self.reference, self.port, self.name, self.failed = reference, port, name, False

    def report(self, good, what):
        self.failed |= not good
        print(f"{'ok  ' if good else 'FAIL'} {self.name}: {what}", flush=True)

    def generate(self, prompt, **fields):
        body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": NUM_TOKENS, "end_id": -1,
                "exclude_input_in_output": True} | fields
        url = f"http://localhost:{self.port}/v2/models/tensorrt_llm/generate"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            return json.load(urllib.request.urlopen(request, timeout=120))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{fields}: {error.read().decode()}") from error

    def greedy(self):
        """Greedy output with drafts, which the model's configuration enables, and without."""
        drafted = accepted = differ = 0
        behind = 0.0
        for prompt in PROMPTS:
            plain = self.generate(prompt, parameters={"prompt_lookup_num_tokens": 0}, request_output_len=96)["output_ids"]
            answer = self.generate(prompt, return_perf_metrics=True, request_output_len=96)
            behind = max(behind, *(self.reference.behind(prompt, ids) for ids in (plain, answer["output_ids"])))
            differ += plain != answer["output_ids"]
            drafted, accepted = drafted + answer["total_draft_tokens"], accepted + answer["total_accepted_draft_tokens"]
        good = drafted > 0 and behind <= 2 * self.reference.worst
        self.report(good, f"greedy behind fp32 by at most {behind:.2e} ({2 * self.reference.worst:.2e} allowed); drafts: {accepted} of "
                       f"{drafted} accepted, {differ} of {len(PROMPTS)} outputs other than without")

    def logits(self):
        errors = []
        for prompt in PROMPTS:
            answer = self.generate(prompt, return_context_logits=True, return_generation_logits=True)
            rows = lambda name, count: torch.tensor(answer[name]).view(count, -1).log_softmax(-1)
            errors.append(rows("context_logits", len(prompt)) - self.reference.log_probs(prompt))
            tokens = answer["output_ids"]
            errors.append(rows("generation_logits", len(tokens)) - self.reference.of_output(prompt, tokens))
        errors = torch.cat([error.flatten() for error in errors])
        rms, worst = errors.pow(2).mean().sqrt().item(), errors.abs().max().item()
        good = rms <= 1.25 * self.reference.rms and worst <= 2 * self.reference.worst
        self.report(good, f"logits of prompts and outputs: error rms {rms:.2e} worst {worst:.2e} "
                       f"(transformers bf16 {self.reference.rms:.2e} {self.reference.worst:.2e})")

    def beams(self, width=4):
        allowed = 2 * self.reference.worst * NUM_TOKENS
        off, behind, distinct = 0.0, 0.0, True
        for prompt in PROMPTS:
            answer = self.generate(prompt, beam_width=width, return_log_probs=True)
            lengths, sums = answer["sequence_length"], answer["cum_log_probs"]
            ids = torch.tensor(answer["output_ids"]).view(width, -1)
            beams = [row[:length].tolist() for row, length in zip(ids, lengths)]
            distinct &= len({tuple(beam) for beam in beams}) == width
            for tokens, reported in zip(beams, sums):
                rows = self.reference.of_output(prompt, tokens)
                off = max(off, abs(rows.gather(1, torch.tensor(tokens)[:, None]).sum().item() - reported))
            behind = max(behind, self.reference.best_beam(prompt, width) - sums[0])
        good = distinct and off <= allowed and behind <= allowed
        self.report(good, f"{width} beams: log-probabilities of {NUM_TOKENS} tokens off fp32's by at most {off:.2e}, the best behind "
                       f"transformers' by at most {behind:.2e} ({allowed:.2e} allowed)")

    def decay(self):
        """Top-p that decays to almost 0 leaves one token, so all tokens after the first are greedy."""
        behind, firsts = 0.0, set()
        for seed in range(6):
            fields = dict(temperature=1.0, runtime_top_p=0.99, runtime_top_p_decay=1e-6, seed=seed)
            tokens = self.generate(PROMPTS[0], **fields)["output_ids"]
            firsts.add(tokens[0])
            behind = max(behind, self.reference.behind(PROMPTS[0] + tokens[:1], tokens[1:]))
        good = len(firsts) > 1 and behind <= 2 * self.reference.worst
        self.report(good, f"top-p that decays: {len(firsts)} first tokens of 6 seeds, what follows behind the likeliest by at most {behind:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--layouts", nargs="+", default=["1x1"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bin", default="target/release", help="folder of `launch` and `trireme`")
    parser.add_argument("--port", type=int, default=8760)
    args = parser.parse_args()
    reference, failed = Reference(args.checkpoint), False
    for layout in args.layouts:
        tp, pp = map(int, layout.split("x"))
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(args.checkpoint, args.device, pathlib.Path(scratch), args.bin, args.port, rows=16)
            bench.set_parameters(tp=tp, pp=pp, prompt_lookup_num_tokens=4, max_num_tokens=1024)
            check = Check(reference, args.port, f"tp {tp} pp {pp}")
            bench.start(tp * pp)
            try:
                for part in (check.greedy, check.logits, check.beams, check.decay):
                    try:
                        part()
                    except (RuntimeError, KeyError, OSError) as error:
                        check.report(False, f"{part.__name__}: {error!r}")
            finally:
                bench.stop()
            failed |= check.failed
    sys.exit(failed)


main()
