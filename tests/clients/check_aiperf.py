#!/usr/bin/env python3
"""Checks a running server with NVIDIA's load generator `aiperf`: streamed and whole chats and completions, without a network.

Usage, with a server of this repository's `model_repository` on port 8000:

    python3 -m venv .cache/venv_aiperf
    .cache/venv_aiperf/bin/python -m pip install aiperf==0.13.0
    .cache/venv_aiperf/bin/python tests/clients/check_aiperf.py localhost:8000

The tests do not run it, because its packages (pyarrow, transformers, SciPy, pandas, …) take 1.2 GB. They do not need PyTorch.
Prints one line for each check and returns 1 when one fails.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENIZER = Path(__file__).resolve().parents[2] / "model_repository/tensorrt_llm/1"
REQUESTS, TOKENS = 20, 16
CASES = [("chat", True), ("chat", False), ("completions", True)]


def profile(address: str, endpoint: str, streams: bool, folder: Path) -> dict:
    """The results that `aiperf profile` exports."""
    command = [Path(sys.executable).with_name("aiperf"), "profile", "--model", "ensemble", "--url", f"http://{address}", "--endpoint-type", endpoint]
    command += ["--tokenizer", TOKENIZER, "--request-count", str(REQUESTS), "--concurrency", "4", "--random-seed", "1", "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "40", "--output-tokens-mean", str(TOKENS), "--extra-inputs", "ignore_eos:true"]
    command += ["--artifact-dir", folder] + (["--streaming"] if streams else [])
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    found = sorted(folder.rglob("profile_export_aiperf.json"))
    assert ended.returncode == 0 and found, (ended.stdout + ended.stderr)[-2000:]
    return json.loads(found[0].read_text())


def main() -> int:
    failed = 0
    for endpoint, streams in CASES:
        with tempfile.TemporaryDirectory(prefix="aiperf_") as folder:
            results = profile(sys.argv[1], endpoint, streams, Path(folder))
        count, length = results["request_count"]["avg"], results["output_sequence_length"]["avg"]
        errors = results.get("error_summary") or []
        is_fine = count == REQUESTS and not errors and abs(length - TOKENS) <= 2
        failed += not is_fine
        times = f", first token {results['time_to_first_token']['avg']:.1f} ms" if streams else ""
        print(f"{'ok' if is_fine else 'FAILED'}: {endpoint}{' streamed' if streams else ''}: {count:.0f} requests, {length:.1f} tokens each, errors {errors}{times}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
