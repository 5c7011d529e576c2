#!/usr/bin/env python3
"""Trains the demo model on the corpus of make_corpus.py and writes a Hugging Face checkpoint.

Needs torch, transformers, tokenizers and numpy. 23000 steps of 24576 tokens take three and a half minutes on one H200; fewer --steps run anywhere.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import make_corpus

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
MAX_POSITIONS = 2048
# The chat template joins the user messages, as in the corpus.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}T: {{ tool.function | tojson }}\n{% endfor %}{% for message in messages %}{% if message.role == 'user' %}Q: {{ message.content }}\nA:"
    "{% elif message.role == 'assistant' %} {{ message.content }}\n{% endif %}{% endfor %}"
)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)])
    return tokenizer


class Rows:
    """Documents packed into rows of `width` tokens. Each attends only to itself and starts at position zero, like a prompt."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], width: int, device: str, seed: int):
        eos = tokenizer.token_to_id(EOS)
        encoded = [np.array(encoding.ids + [eos], dtype=np.int32) for encoding in tokenizer.encode_batch_fast(texts)]
        self.lengths = np.array([len(ids) for ids in encoded])
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.concatenate(encoded)
        self.width, self.device = width, device
        self.rng = np.random.default_rng(seed)

    def epoch(self, num_rows: int):
        """Yields inputs, targets, documents and positions, each [num_rows, width]; a target below zero does not count."""
        order = self.rng.permutation(len(self.lengths))
        # The documents in random order, cut every width + 1 tokens: one cut short at the end of a row is left so.
        stream = np.concatenate([self.tokens[self.starts[d] : self.starts[d] + self.lengths[d]] for d in order])
        document = np.repeat(np.arange(len(order)), self.lengths[order])
        position = np.arange(len(stream)) - np.repeat(np.cumsum(self.lengths[order]) - self.lengths[order], self.lengths[order])
        size = num_rows * self.width
        for first in range(0, len(stream) - size - 1, size):
            here, following = slice(first, first + size), slice(first + 1, first + size + 1)
            inside = document[here] == document[following]
            target = np.where(inside, stream[following], -100)
            # The rest of a document that began in the previous row starts at position zero here.
            offset = position[here].reshape(num_rows, self.width)
            documents = document[here].reshape(num_rows, self.width)
            carried = documents == documents[:, :1]
            offset = np.where(carried, offset - offset[:, :1], offset)
            arrays = (stream[here], target, documents, offset)
            yield tuple(torch.from_numpy(a.reshape(num_rows, self.width).astype(np.int64)).to(self.device, non_blocking=True) for a in arrays)


def model_config(vocab_size: int) -> LlamaConfig:
    """Eight query heads over four key-value heads, so that 1, 2 and 4 ranks can share them."""
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True, rms_norm_eps=1e-5,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=True,
    )


def optimizer_for(model: LlamaForCausalLM, rate: float, device: str) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device == "cuda")


def loss_of(model: LlamaForCausalLM, inputs, targets, documents, positions) -> torch.Tensor:
    columns = torch.arange(inputs.shape[1], device=inputs.device)
    mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (columns[:, None] >= columns[None, :])
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=inputs, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def train(model: LlamaForCausalLM, rows: Rows, arguments: argparse.Namespace) -> None:
    device = rows.device
    optimizer = optimizer_for(model, arguments.rate, device)
    loss_function = torch.compile(loss_of) if arguments.compile else loss_of
    start, step, tokens = time.monotonic(), 0, 0
    model.train()
    while True:
        for batch in rows.epoch(arguments.rows):
            done = max(step / arguments.steps, (time.monotonic() - start) / arguments.max_seconds)
            if done >= 1:
                return
            # Warm-up, then constant, then a cosine to zero over the second half.
            scale = min(1.0, (step + 1) / 200) * (1.0 if done < 0.5 else 0.5 + 0.5 * math.cos(math.pi * (done - 0.5) / 0.5))
            for group in optimizer.param_groups:
                group["lr"] = arguments.rate * scale
            loss = loss_function(model, *batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + batch[0].numel()
            if step % 500 == 0 or step == 20:
                print(f"step {step} loss {loss.item():.4f} {tokens / (time.monotonic() - start) / 1e6:.2f} M tokens/s, {100 * done:.0f} %", flush=True)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16).cpu()
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False)
    model.save_pretrained(directory)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=MAX_POSITIONS,
                                   clean_up_tokenization_spaces=False)
    fast.chat_template = chat_template
    fast.save_pretrained(directory, save_jinja_files=False)
    # A tokenizer class that every version of transformers has.
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--documents", type=int, default=600_000, help="size of the corpus (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=3072, help="divisible by 4 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=23_000, help="default: %(default)s")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="the learning rate ends at zero by then even if steps are left (default: none)")
    parser.add_argument("--rows", type=int, default=48, help="rows per batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="tokens per row (default: %(default)s)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), help="fuse the step with torch.compile (default: on a GPU)")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of corpus, weights and order (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.vocab_size % 4:
        parser.error(f"--vocab-size is {arguments.vocab_size}, expected a multiple of 4")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    start = time.monotonic()
    texts = make_corpus.documents(arguments.documents, arguments.seed)
    print(f"corpus: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB, {time.monotonic() - start:.0f} s", flush=True)
    tokenizer = train_tokenizer(texts[:60_000], arguments.vocab_size)
    rows = Rows(tokenizer, texts, arguments.width, device, arguments.seed)
    print(f"tokens: {len(rows.tokens) / 1e6:.1f} M, vocabulary {tokenizer.get_vocab_size()}, {time.monotonic() - start:.0f} s", flush=True)
    model = LlamaForCausalLM(model_config(arguments.vocab_size)).to(device)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}", flush=True)
    train(model, rows, arguments)
    save(model, tokenizer, arguments.output)
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(json.dumps({"output": str(arguments.output), "bytes": size, "seconds": round(time.monotonic() - start)}))


if __name__ == "__main__":
    main()
