#!/usr/bin/env python3
"""Trains a model of 113 million parameters on the texts of the Python installation, to measure what larger models lose to quantization.

    train_larger.py --output DIR [--minutes 5] [--text FOLDER...]

Writes a Hugging Face checkpoint (Llama, bf16), and beside it `heldout.txt`, files that it was not trained on, and `calibration.txt`, some
that it was: scripts/quantization_accuracy.py measures with both. Needs torch, transformers and tokenizers, and no network. On one H100 the
defaults suit; `--minutes 0.5 --hidden 128 --layers 2 --rows 4 --megabytes 8` runs anywhere.
"""

import argparse
import hashlib
import json
import math
import site
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from train import EOS, optimizer_for, save, train_tokenizer

SUFFIXES = {".py", ".txt", ".rst", ".md"}
LARGEST_FILE = 1_000_000  # larger ones hold data
HELD_OUT = 0.02
TOKENIZER_BYTES = 30_000_000
CALIBRATION_BYTES = 400_000
WARM_UP = 100


def read_texts(folders: list[Path], limit: int) -> list[str]:
    """Files of the folders, each content once, in an order that depends on contents alone; at most about `limit` bytes."""
    found = {}
    for folder in folders:
        for file in folder.rglob("*"):
            if file.suffix not in SUFFIXES or not file.is_file() or not 200 <= file.stat().st_size <= LARGEST_FILE:
                continue
            content = file.read_bytes()
            found[hashlib.sha256(content).digest()] = content
    texts, size = [], 0
    for key in sorted(found):
        try:
            texts.append(found[key].decode())
        except UnicodeDecodeError:
            continue
        size += len(found[key])
        if size >= limit:
            break
    return texts


def beginning(texts: list[str], limit: int) -> list[str]:
    """The first texts, at most about `limit` characters."""
    sizes = np.cumsum([len(text) for text in texts])
    return texts[: int(np.searchsorted(sizes, limit)) + 1]


def tokens_of(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts, one behind the other, each with an end."""
    end, parts = tokenizer.token_to_id(EOS), []
    for first in range(0, len(texts), 1000):
        encoded = tokenizer.encode_batch_fast(texts[first : first + 1000])
        parts.append(np.array([token for encoding in encoded for token in [*encoding.ids, end]], dtype=np.int32))
    return torch.from_numpy(np.concatenate(parts))


def model_config(arguments: argparse.Namespace) -> LlamaConfig:
    """Heads of 64, of which several share keys and values. All sizes are multiples of 128 if the width is one."""
    heads = arguments.hidden // 64
    return LlamaConfig(
        vocab_size=arguments.vocab_size, hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 8 // 3 // 128 * 128,
        num_hidden_layers=arguments.layers, num_attention_heads=heads, num_key_value_heads=math.gcd(heads, 4), head_dim=64,
        max_position_embeddings=2048, tie_word_embeddings=True, rms_norm_eps=1e-5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )


def head_loss(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten())


def train(model: LlamaForCausalLM, tokens: torch.Tensor, arguments: argparse.Namespace) -> None:
    device = tokens.device
    optimizer = optimizer_for(model, arguments.rate, device.type)
    loss_function = head_loss
    if arguments.compile:  # The layers share what is compiled for one.
        loss_function = torch.compile(head_loss)
        for layer in model.model.layers:
            layer.compile()
    columns = torch.arange(arguments.width + 1, device=device)
    num_rows = (len(tokens) - 1) // arguments.width
    order = torch.empty(0, dtype=torch.long)
    start, step = time.monotonic(), 0
    model.train()
    while (done := (time.monotonic() - start) / (60 * arguments.minutes)) < 1:
        if len(order) < arguments.rows:
            order = torch.randperm(num_rows)
        chosen, order = order[: arguments.rows], order[arguments.rows :]
        batch = tokens[chosen.to(device)[:, None] * arguments.width + columns].long()
        # Warm-up, then a cosine to zero.
        scale = min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * scale
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
            loss = loss_function(model.lm_head, hidden, batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 or step == 10:
            rate = step * batch[:, 1:].numel() / (time.monotonic() - start)
            print(f"step {step} loss {loss.item():.4f} {rate / 1e3:.0f} thousand tokens/s, {100 * done:.0f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--minutes", type=float, default=5, help="time of training, without reading of texts (default: %(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", help="folders of texts (default: Python's own library and the installed packages)")
    parser.add_argument("--megabytes", type=int, default=250, help="size of all texts at most (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=768, help="width, a multiple of 128 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--vocab-size", type=int, default=16_384, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=64, help="rows per batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="tokens per row (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), help="compile the layers (default: on a GPU)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and order (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.hidden % 128:
        parser.error(f"--hidden is {arguments.hidden}, expected a multiple of 128")

    torch.manual_seed(arguments.seed)
    start = time.monotonic()
    folders = arguments.text or [Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages())]
    texts = read_texts(folders, arguments.megabytes * 1_000_000)
    cut = len(texts) - max(1, round(HELD_OUT * len(texts)))
    texts, held_out = texts[:cut], texts[cut:]
    print(f"{len(texts)} texts, {sum(map(len, texts)) / 1e6:.0f} million characters, {len(held_out)} held out, {time.monotonic() - start:.0f} s", flush=True)
    tokenizer = train_tokenizer(beginning(texts, TOKENIZER_BYTES), arguments.vocab_size)
    tokens = tokens_of(tokenizer, texts)
    print(f"{len(tokens) / 1e6:.1f} million tokens, {time.monotonic() - start:.0f} s", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(model_config(arguments)).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters on {device}", flush=True)
    train(model, tokens.to(device), arguments)
    save(model, tokenizer, arguments.output, chat_template=None)
    (arguments.output / "heldout.txt").write_text("\n".join(held_out))
    (arguments.output / "calibration.txt").write_text("\n".join(beginning(texts, CALIBRATION_BYTES)))
    print(json.dumps({"output": str(arguments.output), "seconds": round(time.monotonic() - start)}))


if __name__ == "__main__":
    main()
