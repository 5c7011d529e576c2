#!/usr/bin/env python3
"""Records what transformers computes from checkpoints that `trireme quantize` wrote, and their digests, in tests/goldens/quantize.json.

    scripts/goldens/make_quantize_goldens.py target/debug/trireme

Needs torch, transformers and compressed-tensors. The digest tells the tests of `quantize` that the bytes are still those that transformers
has read. Weights are rounded to bf16 after they are read, as Trireme does; activations stay in fp32.
"""
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CASES = {"../../model_repository/tensorrt_llm/1": ["fp8", "fp8-block", "int8", "int4"], "qwen2": ["fp8", "int8", "int4"]}
PROMPT = [5, 17, 3, 99, 42, 7, 120, 61, 30, 8, 77, 23]


@torch.inference_mode()
def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True), attn_implementation="eager").eval()
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            scheme.input_activations = None
            module.weight.copy_(module.weight.bfloat16().float())
    return [float(f"{value:.6g}") for value in model(torch.tensor([PROMPT])).logits[0, -1].tolist()]


def main():
    goldens = []
    for case, formats in CASES.items():
        for format in formats:
            with tempfile.TemporaryDirectory() as folder:
                out = pathlib.Path(folder) / "out"
                subprocess.run([sys.argv[1], "quantize", ROOT / "tests/goldens" / case, "--format", format, "--out", out], check=True)
                digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
                goldens.append({"case": case, "format": format, "sha256": digest, "prompt": PROMPT, "logits": logits(out)})
    text = "[\n" + ",\n".join(json.dumps(golden) for golden in goldens) + "\n]\n"
    (ROOT / "tests/goldens/quantize.json").write_text(text)


if __name__ == "__main__":
    main()
