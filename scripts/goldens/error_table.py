#!/usr/bin/env python3
"""Prints a table of the errors of all golden checkpoints against transformers, from the output of the test.

    cargo test -p models --test golden_tokens greedy -- --nocapture 2>&1 | scripts/goldens/error_table.py
"""
import json
import pathlib
import re
import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens"
LINE = re.compile(r"(\w+), (\d) workers in (\d) parts: logits within (\S+) of (\S+) allowed, (\d+) of (\d+) tokens")


def main():
    cases = {}
    for case, workers, parts, error, allowed, equal, tokens in LINE.findall(sys.stdin.read()):
        runs = cases.setdefault(case, [])
        runs.append((int(workers), int(parts), float(error), float(error) / float(allowed), int(equal), int(tokens)))
    print("| checkpoint | `architectures` | stored as | workers | workers with half of the experts each | largest error | of what is allowed | tokens compared |")
    print("|---|---|---|---|---|---|---|---|")
    for case, runs in cases.items():
        config = json.loads((GOLDENS / case / "config.json").read_text())
        form = config.get("quantization_config", {}).get("quant_method") or config.get("dtype") or config.get("torch_dtype")
        sizes = lambda is_divided: ", ".join(sorted({str(run[0]) for run in runs if (run[1] > 1) == is_divided})) or "–"
        error, share = max(run[2] for run in runs), max(run[3] for run in runs)
        equal, tokens = sum(run[4] for run in runs), sum(run[5] for run in runs)
        print(f"| `{case}` | {config['architectures'][0]} | {form} | {sizes(False)} | {sizes(True)} | {error:.1e} | {share:.2f} "
              f"| {equal} of {tokens} |")


main()
