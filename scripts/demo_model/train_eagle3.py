#!/usr/bin/env python3
"""Trains an EAGLE-3 head for the demo model and writes its checkpoint, so that `eagle3_num_tokens` has something to accept.

    train_eagle3.py --output DIR [--model model_repository/tensorrt_llm/1] [--seconds 600]

The checkpoint has the form of SpecForge and EAGLE: `fc` joins hidden states of three layers, `midlayer` is the head's layer, `lm_head`
guesses the most frequent tokens of the corpus, and `d2t` and `t2d` say which these are. The head learns the distribution that the model
itself gives, on the model's own corpus. Each pass unrolls the steps of a draft, as in EAGLE-3's "training-time test": behind the first
one the head continues from its own hidden states. Needs torch, numpy and tokenizers.
"""

import argparse
import json
import sys
import time
from pathlib import Path

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

import make_corpus
from train_mtp import Shape, batches, read_weights, write_weights

# The weight of a further step in the loss, as in EAGLE-3.
STEP_DECAY = 0.8


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Rotation:
    """Of positions `first` and those after it."""

    def __init__(self, shape: Shape, first: int, length: int):
        frequencies = shape.theta ** (-torch.arange(0, shape.dim, 2, dtype=torch.float32) / shape.dim)
        angles = torch.outer(torch.arange(first, first + length, dtype=torch.float32), frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1)


def projections(x: Tensor, weights: dict[str, Tensor], shape: Shape, rotation: Rotation) -> list[Tensor]:
    """q, k and v, each [documents, heads, tokens, dim]; k and v repeated for the heads that share them."""
    split = lambda name: F.linear(x, weights[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, shape.dim)).transpose(1, 2)
    q, k, v = (split(name) for name in "qkv")
    return [rotation(q)] + [part.repeat_interleave(shape.heads // shape.kv_heads, 1) for part in (rotation(k), v)]


def behind_attention(x: Tensor, attended: Tensor, weights: dict[str, Tensor], eps: float) -> Tensor:
    """The rest of a layer of Llama's form. `attended` is [documents, heads, tokens, dim]."""
    x = x + F.linear(attended.transpose(1, 2).flatten(2), weights["self_attn.o_proj.weight"])
    normed = norm(x, weights["post_attention_layernorm.weight"], eps)
    gate, up = (F.linear(normed, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"])


class Model:
    """The demo model, which stays as it is."""

    def __init__(self, weights: dict[str, np.ndarray], shape: Shape):
        self.shape, self.weights = shape, {name: torch.from_numpy(values) for name, values in weights.items()}
        self.embedding, self.norm = self.weights["model.embed_tokens.weight"], self.weights["model.norm.weight"]
        self.layers = [self.layer(index) for index in range(shape.layers)]

    def layer(self, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        return {name.removeprefix(prefix): values for name, values in self.weights.items() if name.startswith(prefix)}

    @torch.no_grad()
    def states(self, tokens: Tensor, taps: list[int]) -> tuple[Tensor, Tensor]:
        """The inputs of some layers side by side, and the output behind the last norm."""
        x, inputs, rotation = self.embedding[tokens], {}, Rotation(self.shape, 0, tokens.shape[1])
        for index, weights in enumerate(self.layers):
            inputs[index] = x
            q, k, v = projections(norm(x, weights["input_layernorm.weight"], self.shape.eps), weights, self.shape, rotation)
            x = behind_attention(x, F.scaled_dot_product_attention(q, k, v, is_causal=True), weights, self.shape.eps)
        return torch.cat([inputs[tap] for tap in taps], -1), norm(x, self.norm, self.shape.eps)


class Head(nn.Module):
    def __init__(self, model: Model, tokens: Tensor, num_taps: int):
        super().__init__()
        self.shape, self.embedding = model.shape, model.embedding
        hidden, last = model.shape.hidden, model.layers[-1]
        # It begins as the model's last layer, which has seen such hidden states: those of the last tap.
        self.fc = nn.Parameter(torch.cat([0.02 * torch.randn(hidden, hidden) for _ in range(num_taps - 1)] + [torch.eye(hidden)], -1))
        layer = {name: values.clone() for name, values in last.items()}
        layer["hidden_norm.weight"], layer["input_layernorm.weight"] = layer["input_layernorm.weight"], torch.ones(hidden)
        for name in "qkv":
            weight = layer[f"self_attn.{name}_proj.weight"]
            layer[f"self_attn.{name}_proj.weight"] = torch.cat([0.3 * weight.std() * torch.randn_like(weight), weight], -1)
        self.names = list(layer)
        self.layer = nn.ParameterList([nn.Parameter(layer[name]) for name in self.names])
        self.norm = nn.Parameter(model.norm.clone())
        self.lm_head = nn.Parameter(model.embedding[tokens].clone())

    def tensors(self) -> dict[str, Tensor]:
        layer = {f"midlayer.{name}": values for name, values in zip(self.names, self.layer)}
        return {"fc.weight": self.fc, **layer, "norm.weight": self.norm, "lm_head.weight": self.lm_head}

    def forward(self, joined: Tensor, tokens: Tensor, num_steps: int):
        """Yields the logits of each step for each position `p` from which a draft begins. `joined` are hidden states at `p`, `tokens`
        [documents, length + num_steps - 1] those behind `p`. Step `j` runs at `p + j`: it attends to what the model's hidden states gave
        at `p` and before, and to the steps before it of the same draft."""
        length, eps, weights = joined.shape[1], self.shape.eps, dict(zip(self.names, self.layer))
        hidden, keys, values = F.linear(joined, self.fc), [], []
        future = torch.full((length, length), float("-inf")).triu(1)
        for step in range(num_steps):
            embedded = norm(self.embedding[tokens[:, step : step + length]], weights["input_layernorm.weight"], eps)
            both = torch.cat([embedded, norm(hidden, weights["hidden_norm.weight"], eps)], -1)
            q, k, v = projections(both, weights, self.shape, Rotation(self.shape, step, length))
            keys.append(k)
            values.append(v)
            scores = [q @ keys[0].transpose(-1, -2) * self.shape.dim**-0.5 + future]
            scores += [(q * key).sum(-1, keepdim=True) * self.shape.dim**-0.5 for key in keys[1:]]
            shares = torch.cat(scores, -1).softmax(-1)
            attended = shares[..., :length] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + shares[..., length + index, None] * value
            hidden = behind_attention(hidden, attended, weights, eps)
            yield F.linear(norm(hidden, self.norm, eps), self.lm_head)


def frequent_tokens(tokenizer: Tokenizer, texts: list[str], vocab_size: int, eos: int, count: int) -> tuple[Tensor, float]:
    """The most frequent tokens in ascending order, and their share of the corpus."""
    ids = np.concatenate([encoding.ids + [eos] for encoding in tokenizer.encode_batch_fast(texts)])
    counts = np.bincount(ids, minlength=vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:count])
    return torch.from_numpy(chosen), counts[chosen].sum() / counts.sum()


def train(head: Head, model: Model, draft_tokens: Tensor, data, arguments: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.0)
    start, num_batches, steps = time.monotonic(), 0, arguments.steps
    right, counted = np.zeros(steps), np.zeros(steps)
    while (done := (time.monotonic() - start) / arguments.seconds) < 1:
        tokens, counts = (torch.from_numpy(array) for array in next(data))
        length = tokens.shape[1] - 1 - steps
        if length < 1:
            continue
        joined, output = model.states(tokens[:, :-1], arguments.taps)
        with torch.no_grad():
            logits = F.linear(output, model.embedding)
            best, targets = logits.argmax(-1), logits[..., draft_tokens].softmax(-1)
        loss = 0.0
        for step, guessed in enumerate(head(joined[:, :length], tokens[:, 1:], steps)):
            # What the model says behind the token at `p + step + 1`.
            here = slice(step + 1, step + 1 + length)
            weight = counts[:, step + 2 : step + 2 + length].float()
            losses = -(targets[:, here] * guessed.log_softmax(-1)).sum(-1)
            loss = loss + STEP_DECAY**step * (losses * weight).sum() / weight.sum().clamp(min=1)
            with torch.no_grad():
                right[step] += ((draft_tokens[guessed.argmax(-1)] == best[:, here]) * weight).sum().item()
                counted[step] += weight.sum().item()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        # Warm-up, constant, and to zero over the second half.
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * min(1.0, (num_batches + 1) / 50) * (1.0 if done < 0.5 else 2 - 2 * done)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_batches += 1
        if num_batches % 50 == 0:
            shares = ", ".join(f"{share:.1%}" for share in right / counted)
            print(f"batch {num_batches}: {shares} right in steps 1 to {steps}, {time.monotonic() - start:.0f} s", flush=True)
            right, counted = np.zeros(steps), np.zeros(steps)


def save(directory: Path, config: dict, head: Head, draft_tokens: Tensor, taps: list[int]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    own = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False,
        "draft_vocab_size": len(draft_tokens), "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True},
    }
    (directory / "config.json").write_text(json.dumps(config | own, indent=2) + "\n")
    tensors = {name: values.detach().numpy() for name, values in head.tensors().items()}
    tensors["d2t"] = (draft_tokens - torch.arange(len(draft_tokens))).numpy()
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), draft_tokens.numpy())
    write_weights(directory / "model.safetensors", tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "model_repository/tensorrt_llm/1"
    parser.add_argument("--model", type=Path, default=default, help="checkpoint of the demo model (default: that of the repository)")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--seconds", type=float, default=600, help="how long it trains (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=20_000, help="size of the corpus (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="documents per pass (default: %(default)s)")
    parser.add_argument("--width", type=int, default=160, help="most tokens of a document (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="guesses that a pass unrolls (default: %(default)s)")
    parser.add_argument("--taps", type=int, nargs=3, default=[1, 3, 4], help="layers whose inputs the head takes (default: %(default)s)")
    parser.add_argument("--draft-vocab-size", type=int, default=1024, help="tokens that it can guess (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=6, help="seed of corpus, weights and order (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    config = json.loads((arguments.model / "config.json").read_text())
    model = Model(read_weights(arguments.model / "model.safetensors"), Shape(config))
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    texts, eos = make_corpus.documents(arguments.documents, arguments.seed), config["eos_token_id"]
    draft_tokens, share = frequent_tokens(tokenizer, texts, config["vocab_size"], eos, arguments.draft_vocab_size)
    print(f"{len(draft_tokens)} of {config['vocab_size']} tokens are {share:.1%} of the corpus", flush=True)
    head = Head(model, draft_tokens, len(arguments.taps))
    data = batches(tokenizer, texts, eos, arguments.rows, arguments.width, arguments.seed)
    train(head, model, draft_tokens, data, arguments)
    save(arguments.output, config, head, draft_tokens, arguments.taps)


if __name__ == "__main__":
    main()
