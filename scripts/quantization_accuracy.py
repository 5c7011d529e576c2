#!/usr/bin/env python3
"""Measures what quantization costs the demo model, and how exactly Trireme computes each format.

    python3 -m venv V && V/bin/pip install torch transformers==5.23.0 compressed-tensors==0.20.0 accelerate && V/bin/pip install --no-deps autoawq
    cargo build --release --bin trireme
    V/bin/python scripts/quantization_accuracy.py --trireme target/release/trireme

Each format is written by `trireme quantize`, or by the code of the format's own package, or made at load, or that of the KV cache, and served on the CPU. The log-probabilities of the tokens of texts that are not in
the calibration text are compared with those that transformers computes in fp32, from the same checkpoint and from the original. Prints a
table in Markdown.
"""
import argparse
import json
import math
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts/goldens"))
from quantized import quantized

FORMATS = ["fp8", "fp8-block", "int8", "int4", "int4-awq"]
PACKED = {"awq": "llama_awq", "mxfp8": "llama_mxfp8", "nvfp4": "qwen3_nvfp4"}  # written as these goldens are
AT_LOAD = ["fp8", "int8", "int4"]
CACHES = ["fp8", "int8"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trireme", type=pathlib.Path, default=ROOT / "target/debug/trireme")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "model_repository/tensorrt_llm/1")
    parser.add_argument("--documents", type=int, default=48, help="texts to measure with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args, pathlib.Path(folder))


def measure(args, folder):
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [tokenizer(text).input_ids for text in corpus(seed=7, documents=args.documents)]
    calibration = folder / "calibration.txt"
    calibration.write_text("\n\n".join(corpus(seed=5, documents=400)))
    original = reference(args.model, texts)
    print("| format | perplexity | transformers, same format | error of a log-probability against it | against the original |")
    print("|---|---|---|---|---|")
    row("bf16", served(args, args.model, [], texts), original, original)
    for format in FORMATS:
        out = folder / format
        text = ["--calibration", calibration] if format == "int4-awq" else []
        subprocess.run([args.trireme, "quantize", args.model, "--format", format, "--out", out, *text], check=True)
        row(format, served(args, out, [], texts), reference(out, texts), original)
    for name, golden in PACKED.items():
        out = folder / golden
        values = packed(args.model, out, golden)
        row(name, served(args, out, [], texts), reference(args.model, texts, values), original)
    for precision in AT_LOAD:
        row(f"{precision} at load", served(args, args.model, [f"--quantization={precision}"], texts), None, original)
    for kind in CACHES:
        row(f"keys and values in {kind}", served(args, args.model, [f"--kv-cache-dtype={kind}"], texts), None, original)


def corpus(seed, documents):
    command = [sys.executable, ROOT / "scripts/demo_model/make_corpus.py", "--documents", str(documents), "--seed", str(seed)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def packed(model, out, golden):
    """Writes the model in the form of a golden. Returns the values of its tensors."""
    config, stored, values = quantized(golden, load_file(model / "model.safetensors"))
    out.mkdir()
    for file in model.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    (out / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | {"quantization_config": config}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, out / "model.safetensors")
    return values


@torch.inference_mode()
def reference(model, texts, values=None):
    """Log-probabilities of the tokens of each text after the first, in fp32, with other values of tensors if there are any."""
    is_quantized = "quantization_config" in json.loads((model / "config.json").read_text())
    own = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_quantized else {}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **own).eval()
    if values:
        different = loaded.load_state_dict({name: tensor.float() for name, tensor in values.items()}, strict=False)
        # The head may be the embedding.
        assert not different.unexpected_keys and set(different.missing_keys) <= {"lm_head.weight"}, different
    # Weights alone are quantized: servers that also round activations compute something else.
    for module in loaded.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.quantization_scheme.input_activations = None
    found = []
    for ids in texts:
        logprobs = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append([logprobs[index, token].item() for index, token in enumerate(ids[1:])])
    return found


def served(args, model, flags, texts):
    """The same from a server on this machine's CPU."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    port, grpc_port, metrics_port = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    command = [args.trireme, "serve", model, "--device=cpu", "--host=127.0.0.1", f"--port={port}", f"--grpc-port={grpc_port}",
               f"--metrics-port={metrics_port}", "--served-model-name=demo", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait(server, port)
            return [logprobs(port, ids) for ids in texts]
        finally:
            server.terminate()
            server.communicate()


def wait(server, port):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server does not become ready: " + (server.stderr.read() if server.poll() is not None else ""))


def logprobs(port, ids):
    body = {"model": "demo", "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    return answer["choices"][0]["logprobs"]["token_logprobs"][1:len(ids)]


def row(name, ours, same, original):
    flat = lambda all: [value for one in all for value in one]
    error = lambda a, b: math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))
    perplexity = lambda all: math.exp(-sum(all) / len(all))
    ours, original = flat(ours), flat(original)
    theirs = flat(same) if same else None
    cells = [name, f"{perplexity(ours):.4f}", f"{perplexity(theirs):.4f}" if theirs else "–",
             f"{error(ours, theirs):.1e}" if theirs else "–", f"{error(ours, original):.1e}"]
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
