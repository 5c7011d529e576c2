#!/usr/bin/env python3
"""Measures what quantization costs a model, and how exactly Trireme computes each format.

    python3 -m venv V && V/bin/pip install torch transformers==5.23.0 compressed-tensors==0.20.0 accelerate && V/bin/pip install --no-deps autoawq auto-gptq
    cargo build --release --bin trireme
    V/bin/python scripts/quantization_accuracy.py --trireme target/release/trireme
    V/bin/python scripts/quantization_accuracy.py --trireme target/release/trireme --device cuda --model DIR --text DIR/heldout.txt --calibration DIR/calibration.txt

The second form is for a model of scripts/demo_model/train_larger.py, or any other with text of its own. Each format is written by `trireme
quantize`, or by the code of the format's own package, or made at load, or that of the KV cache, and served. The log-probabilities of the
tokens of texts that are not in the calibration text are compared with those that transformers computes in fp32, from the same values and
from the original. Prints a table in Markdown; a format that fails has a row with the reason, and the script then returns 1.
"""
import argparse
import json
import math
import pathlib
import shutil
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
from make_kv_cache_goldens import RoundedCache
from quantized import FLOATS, FORMS, affine, quantized

FORMATS = ["fp8", "fp8-block", "int8", "int4", "int4-awq"]
FORMS["gptq"] = ("gptq", dict(bits=4, act_order=False))
FORMS["mxfp4"] = ("mxfp4-pack-quantized", FLOATS(4, "group", group_size=32, scale_dtype=torch.uint8))
# Written as the golden of this name is, or as the row above says.
PACKED = {"awq": "llama_awq", "gptq": "gptq", "mxfp8": "llama_mxfp8", "mxfp4": "mxfp4", "nvfp4": "qwen3_nvfp4"}
AT_LOAD = {"cpu": ["fp8", "int8", "int4"], "cuda": ["fp8", "int8", "int4"]}
CACHES = ["fp8", "int8"]
STARTUP_SECONDS = 120


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trireme", type=pathlib.Path, default=ROOT / "target/debug/trireme")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "model_repository/tensorrt_llm/1")
    parser.add_argument("--device", choices=list(AT_LOAD), default="cpu")
    parser.add_argument("--documents", type=int, default=48, help="texts of the demo model's corpus to measure with (default: %(default)s)")
    parser.add_argument("--text", type=pathlib.Path, help="measure with windows of this file instead")
    parser.add_argument("--calibration", type=pathlib.Path, help="text for int4-awq, needed with --text")
    parser.add_argument("--windows", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a window (default: %(default)s)")
    args = parser.parse_args()
    if args.text and not args.calibration:
        parser.error("--text needs --calibration")
    with tempfile.TemporaryDirectory() as folder:
        return measure(args, pathlib.Path(folder))


def measure(args, folder):
    texts = windows(args) if args.text else demo_texts(args, folder)
    original = reference(args, args.model, texts)
    print("| format | perplexity | transformers, same format | error of a log-probability against it | against the original |")
    print("|---|---|---|---|---|")
    rows = [("bf16", lambda: (served(args, args.model, [], texts), original))]
    rows += [(format, lambda format=format: written(args, folder / "written", format, texts)) for format in FORMATS]
    rows += [(name, lambda golden=golden: packed(args, folder / "packed", golden, texts)) for name, golden in PACKED.items()]
    rows += [(f"{precision} at load", lambda precision=precision: at_load(args, precision, texts)) for precision in AT_LOAD[args.device]]
    rows += [(f"keys and values in {kind}", lambda kind=kind: in_cache(args, kind, texts)) for kind in CACHES]
    has_failed = False
    for name, find in rows:
        start = time.monotonic()
        try:
            row(name, *find(), original)
        except Exception as error:
            print(f"| {name} | failed: {' '.join(str(error).split())} | | | |", flush=True)
            has_failed = True
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return has_failed


def demo_texts(args, folder):
    args.calibration = folder / "calibration.txt"
    args.calibration.write_text("\n\n".join(corpus(seed=5, documents=400)))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return [tokenizer(text).input_ids for text in corpus(seed=7, documents=args.documents)]


def windows(args):
    """Parts of the text of equal length, evenly spread over it."""
    ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text()).input_ids
    step = (len(ids) - args.tokens) // max(1, args.windows - 1)
    assert step >= args.tokens, f"{args.text} has {len(ids)} tokens"
    return [ids[number * step:][:args.tokens] for number in range(args.windows)]


def corpus(seed, documents):
    command = [sys.executable, ROOT / "scripts/demo_model/make_corpus.py", "--documents", str(documents), "--seed", str(seed)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def written(args, out, format, texts):
    text = ["--calibration", args.calibration] if format == "int4-awq" else []
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([args.trireme, "quantize", args.model, "--format", format, "--out", out, *text], check=True, stdout=subprocess.DEVNULL)
    return served(args, out, [], texts), reference(args, out, texts)


def packed(args, out, golden, texts):
    """Of the model in the form of a golden."""
    config, stored, values = quantized(golden, load_file(args.model / "model.safetensors"))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for file in args.model.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    (out / "config.json").write_text(json.dumps(json.loads((args.model / "config.json").read_text()) | {"quantization_config": config}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, out / "model.safetensors")
    return served(args, out, [], texts), reference(args, args.model, texts, values)


def at_load(args, precision, texts):
    """transformers has the values that the device makes, unless it also rounds the inputs of layers: the integers of CPUs."""
    ours = served(args, args.model, [f"--quantization={precision}"], texts)
    if args.device == "cpu" and precision != "fp8":
        return ours, None
    rounded = {"fp8": fp8_rows, "int8": int8_rows, "int4": int4_groups}[precision]
    tensors = load_file(args.model / "model.safetensors")
    values = {name: rounded(tensor.float()) if name.endswith("proj.weight") else tensor for name, tensor in tensors.items()}
    return ours, reference(args, args.model, texts, values)


def fp8_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def int8_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def int4_groups(weight):
    scale, zero = (each.repeat_interleave(128, 1) for each in affine(weight, 4, 128))
    return ((weight / scale + zero).round().clamp(0, 15) - zero) * scale


def in_cache(args, kind, texts):
    return served(args, args.model, [f"--kv-cache-dtype={kind}"], texts), reference(args, args.model, texts, cache=kind)


@torch.inference_mode()
def reference(args, model, texts, values=None, cache=None):
    """Log-probabilities of the tokens of each text after the first, in fp32, with other values of tensors if there are any."""
    is_quantized = "quantization_config" in json.loads((model / "config.json").read_text())
    own = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_quantized else {}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **own).to(args.device).eval()
    if values:
        different = loaded.load_state_dict({name: tensor.float() for name, tensor in values.items()}, strict=False)
        # The head may be the embedding.
        assert not different.unexpected_keys and set(different.missing_keys) <= {"lm_head.weight"}, different
    # Weights alone are quantized: servers that also round activations compute something else.
    for module in loaded.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.quantization_scheme.input_activations = None
    found = []
    for text in texts:
        ids = torch.tensor([text], device=args.device)
        rounded = {"past_key_values": RoundedCache(cache, loaded.config), "use_cache": True} if cache else {}
        # compressed-tensors may have its layers on the CPU.
        logprobs = loaded(ids, **rounded).logits[0, :-1].to(ids.device).log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def served(args, model, flags, texts):
    """The same from a server."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    port, grpc_port, metrics_port = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    command = [args.trireme, "serve", model, f"--device={args.device}", "--host=127.0.0.1", f"--port={port}", f"--grpc-port={grpc_port}",
               f"--metrics-port={metrics_port}", "--served-model-name=demo", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait(server, port)
            return [logprobs(port, ids) for ids in texts]
        finally:
            server.terminate()
            server.communicate()


def wait(server, port):
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server does not become ready: " + (server.stderr.read() if server.poll() is not None else ""))


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
    sys.exit(main())
