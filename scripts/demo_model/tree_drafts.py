#!/usr/bin/env python3
"""Compares chains of drafts with trees of drafts, for the MTP head of train_mtp.py and the EAGLE-3 head of train_eagle3.py.

    tree_drafts.py --mtp DIR --eagle3 DIR [--model model_repository/tensorrt_llm/1] [--documents 300]

The drafter runs at each position as it does in the server: the first pass takes the model's hidden states, each further pass the drafter's
own. A chain of k is the drafter's likeliest token, k times. A fixed tree has the n paths of ranks that were right most often in one half of
the texts; everything is measured on the other half. An EAGLE-2 tree has the n nodes with the highest products of the drafter's
probabilities; the best four of each depth have children. The right tokens are those that the model chooses greedily behind the first third
of a text. Texts of both heads' trainings with default seeds are left out. Times are those of docs/lab/gpu.md: a step takes the time of as
many rows as it has positions, and each pass of the drafter what measured steps with drafts took beyond that.
Needs torch, transformers, safetensors, numpy and tokenizers.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

import make_corpus
from train_eagle3 import Model, Rotation, behind_attention, norm, projections
from train_mtp import Shape, read_weights

DEPTH, WIDTH = 8, 4  # passes of a draft, and children of a node
SIZES = [2, 3, 4, 5, 6, 7, 8, 16, 32]
# What a pass over four nodes of a row may take beyond one over one node: 0.03 for the choice of four tokens (that of a token of top-k,
# 22009b24), and 0.02 for the nodes (four rows beside one with the EAGLE-3 head).
FURTHER_PASS_MS = 0.05
# Milliseconds of steps without drafts by rows, and of steps with a number of drafts by rows (docs/lab/gpu.md).
DEVICES = {
    "eagle3": ("Llama 3 8B in bf16, H200", {1: 3.883, 2: 3.877, 4: 3.902, 8: 3.943, 16: 4.166, 32: 4.404, 64: 4.858, 128: 6.10}, 3, {1: 4.425, 8: 5.058}),
    "mtp": ("Qwen3.6 27B in fp8, H100", {1: 11.11, 2: 11.29, 4: 11.54, 8: 12.03, 16: 13.51, 32: 16.34, 64: 21.78}, 2, {1: 12.79, 8: 16.80}),
}


class Drafter:
    """A head of either form. Nodes of a draft are [nodes, T, ...]: some at each of T positions from which a draft begins."""

    def __init__(self, model: Model):
        self.model, self.shape, self.eps = model, model.shape, model.shape.eps

    def begin(self, tokens: Tensor) -> None:
        """For a sequence [T + 1], of which the model has computed the first T positions."""
        self.hidden = self.first_hidden(tokens[None, :-1])
        self.keys, self.values = [], []
        length = len(tokens) - 1
        self.future = torch.full((length, length), float("-inf")).triu(1)

    def run(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """The next pass over nodes with these tokens; `parents` says which nodes of the pass before they continue. Both are
        [nodes, T]. Returns log-probabilities [nodes, T, V]."""
        step, (_, length) = len(self.keys), tokens.shape
        chosen = lambda values: values.gather(0, parents[:, :, None].expand(-1, -1, values.shape[-1]))
        x, residual = self.inputs(self.model.embedding[tokens], chosen(self.hidden) if step else self.hidden)
        q, k, v = projections(x, self.weights, self.shape, Rotation(self.shape, step, length))
        if step > 1:  # The keys and values of the ancestors of each node; the first pass has one node.
            ancestor = lambda values: values.gather(0, parents[:, None, :, None].expand(-1, *values.shape[1:2], -1, values.shape[3]))
            self.keys[1:], self.values[1:] = map(ancestor, self.keys[1:]), map(ancestor, self.values[1:])
        self.keys.append(k)
        self.values.append(v)
        scores = [q @ self.keys[0].transpose(-1, -2) * self.shape.dim**-0.5 + self.future]
        scores += [(q * key).sum(-1, keepdim=True) * self.shape.dim**-0.5 for key in self.keys[1:]]
        shares = torch.cat(scores, -1).softmax(-1)
        attended = shares[..., :length] @ self.values[0]
        for index, value in enumerate(self.values[1:]):
            attended = attended + shares[..., length + index, None] * value
        self.hidden = behind_attention(residual, attended, self.weights, self.eps)
        return F.linear(norm(self.hidden, self.norm, self.eps), self.head).log_softmax(-1)


class Eagle3(Drafter):
    def __init__(self, model: Model, directory: Path):
        super().__init__(model)
        tensors = {name: values.float() if values.is_floating_point() else values for name, values in load_file(directory / "model.safetensors").items()}
        self.weights = {name.removeprefix("midlayer."): values for name, values in tensors.items() if name.startswith("midlayer.")}
        self.fc, self.norm, self.head = (tensors[f"{name}.weight"] for name in ("fc", "norm", "lm_head"))
        self.tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        self.taps = json.loads((directory / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    def first_hidden(self, tokens: Tensor) -> Tensor:
        return F.linear(self.model.states(tokens, self.taps)[0], self.fc)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = norm(embedded, self.weights["input_layernorm.weight"], self.eps)
        return torch.cat([embedded, norm(hidden, self.weights["hidden_norm.weight"], self.eps)], -1), hidden


class Mtp(Drafter):
    def __init__(self, model: Model, directory: Path):
        super().__init__(model)
        prefix = f"model.layers.{model.shape.layers}."
        tensors = {name: torch.from_numpy(values) for name, values in read_weights(directory / "model.safetensors").items()}
        self.weights = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
        self.norm, self.head = self.weights["shared_head.norm.weight"], model.embedding
        self.tokens = torch.arange(len(model.embedding))

    def first_hidden(self, tokens: Tensor) -> Tensor:
        return self.model.states(tokens, [0])[1]

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = [norm(x, self.weights[f"{name}.weight"], self.eps) for x, name in ((embedded, "enorm"), (hidden, "hnorm"))]
        x = F.linear(torch.cat(normed, -1), self.weights["eh_proj.weight"])
        return norm(x, self.weights["input_layernorm.weight"], self.eps), x


@torch.inference_mode()
def right_ranks(drafter: Drafter, tokens: Tensor) -> np.ndarray:
    """[T, DEPTH]: the rank of the right token among the drafter's guesses if the path to it was right; WIDTH if it is none of the best."""
    length = len(tokens) - 1
    padded = F.pad(tokens, (0, DEPTH + 1), value=-1)
    drafter.begin(tokens)
    ranks = []
    for step in range(DEPTH):
        guessed = drafter.run(padded[None, 1 + step : 1 + step + length].clamp(min=0), torch.zeros(1, length, dtype=torch.long))
        best = drafter.tokens[guessed[0].topk(WIDTH).indices]
        right = best == padded[2 + step : 2 + step + length, None]
        ranks.append(torch.where(right.any(-1), right.int().argmax(-1), WIDTH))
    return torch.stack(ranks, -1).numpy()


@torch.inference_mode()
def grown(drafter: Drafter, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The nodes of EAGLE-2's tree by depth, each [nodes, T]: the logarithm of the product of probabilities, and whether the path is right."""
    length = len(tokens) - 1
    padded = F.pad(tokens, (0, DEPTH + 1), value=-1)
    drafter.begin(tokens)
    here, parents = padded[None, 1 : 1 + length], torch.zeros(1, length, dtype=torch.long)
    product, right = torch.zeros(1, length), torch.ones(1, length, dtype=torch.bool)
    nodes = []
    for step in range(DEPTH):
        best = drafter.run(here, parents).topk(WIDTH)
        product = (product[..., None] + best.values).permute(0, 2, 1).flatten(0, 1)
        guessed = drafter.tokens[best.indices].permute(0, 2, 1).flatten(0, 1)
        right = right.repeat_interleave(WIDTH, 0) & (guessed == padded[2 + step : 2 + step + length])
        nodes.append((product, right))
        expanded = product.topk(WIDTH, 0).indices
        product, right, here, parents = product.gather(0, expanded), right.gather(0, expanded), guessed.gather(0, expanded), expanded // WIDTH
    return nodes


def accepted_in_grown(nodes: list[tuple[Tensor, Tensor]], size: int, depth: int) -> np.ndarray:
    products, right = (torch.cat(parts) for parts in zip(*nodes[:depth]))
    return right.gather(0, products.topk(size, 0).indices).sum(0).numpy()


def paths_of(ranks: np.ndarray) -> list[tuple[int, ...]]:
    """The right paths from one position, of each length."""
    row = [int(rank) for rank in ranks]
    return [tuple(row[:depth]) for depth in range(1, DEPTH + 1) if WIDTH not in row[:depth]]


def tokens_per_step(accepted: list[np.ndarray], starts: list[int]) -> float:
    """Over whole sequences: a step begins behind the tokens of the last one."""
    tokens = steps = 0
    for counts, start in zip(accepted, starts):
        position = start
        while position < len(counts) - 1:
            steps, position = steps + 1, position + 1 + int(counts[position])
        tokens += len(counts) - 1 - start
    return tokens / steps


def step_ms(device: str, rows: int, verified: int, passes: int, pass_ms: float = 0.0) -> float | None:
    """None where it needs more positions than were measured."""
    _, plain, drafts, with_drafts = DEVICES[device]
    of_rows = lambda positions: np.interp(positions, list(plain), list(plain.values()))
    if rows * (1 + verified) > max(plain):
        return None
    guess = (with_drafts[rows] - of_rows(rows * (1 + drafts))) / drafts
    return of_rows(rows * (1 + verified)) + passes * (guess + pass_ms)


def report(name: str, drafter: Drafter, sequences: list[Tensor], starts: list[int]) -> None:
    ranks = [right_ranks(drafter, tokens) for tokens in sequences]
    grown_nodes = [grown(drafter, tokens) for tokens in sequences]
    half = len(sequences) // 2
    from_starts = lambda parts, chosen: [part[start:-1] for part, start in list(zip(parts, starts))[chosen]]
    known, held = from_starts(ranks, slice(0, half)), np.concatenate(from_starts(ranks, slice(half, None)))
    print(f"\n{name}: {len(held)} positions")
    share = lambda found: found.mean() if len(found) else 0.0
    for depth in range(DEPTH):
        there = held[(held[:, :depth] == 0).all(-1), depth]
        inside = held[(held[:, :depth] < WIDTH).all(-1), depth]
        print(f"  guess {depth + 1}: behind right likeliest ones the likeliest is right {share(there == 0):.3f};"
              f" behind any right path among the best 1 to {WIDTH}:", ", ".join(f"{share(inside < width):.3f}" for width in range(1, WIDTH + 1)))

    frequency = Counter(path for part in known for row in part for path in paths_of(row))
    walk = lambda count: tokens_per_step([count(index) for index in range(half, len(sequences))], starts[half:])
    shapes = []  # kind, verified, passes, tokens a step
    for depth in range(1, DEPTH + 1):
        shapes.append(("chain", depth, depth, walk(lambda index: np.cumprod(ranks[index][:, :depth] == 0, -1).sum(-1))))
        for size in (size for size in SIZES if size > depth):
            tree = {path for path, _ in sorted(((p, c) for p, c in frequency.items() if len(p) <= depth), key=lambda entry: (-entry[1], len(entry[0])))[:size]}
            if len(tree) == size:
                shapes.append(("fixed tree", size, depth, walk(lambda index: np.array([sum(path in tree for path in paths_of(row)) for row in ranks[index]]))))
            if size <= sum(len(nodes) for nodes, _ in grown_nodes[0][:depth]):
                shapes.append(("EAGLE-2 tree", size, depth, walk(lambda index: accepted_in_grown(grown_nodes[index], size, depth))))
    for kind in ("chain", "fixed tree", "EAGLE-2 tree"):
        sizes = sorted({shape[1] for shape in shapes if shape[0] == kind})
        best = [max((shape for shape in shapes if shape[:2] == (kind, size)), key=lambda shape: shape[3]) for size in sizes]
        print(f"  {kind}, tokens a step:", ", ".join(f"{size} {tokens:.3f} (depth {passes})" for _, size, passes, tokens in best))

    for rows in (1, 8):
        print(f"  {DEVICES[name][0]}, {rows} rows:")
        for label, kinds, pass_ms in [("chain", ["chain"], 0.0), ("fixed tree", ["fixed tree"], 0.0), ("EAGLE-2 tree", ["EAGLE-2 tree"], 0.0),
                                      (f"any tree, passes {FURTHER_PASS_MS} ms longer", ["fixed tree", "EAGLE-2 tree"], FURTHER_PASS_MS)]:
            timed = [(rows * shape[3] / ms, ms, *shape) for shape in shapes if shape[0] in kinds and (ms := step_ms(name, rows, *shape[1:3], pass_ms))]
            rate, ms, kind, verified, passes, tokens = max(timed)
            base = rate if label == "chain" else base
            print(f"    {label}: {rate:.4f} tokens a ms ({rate / base - 1:+.1%}): {verified} verified, {passes} passes, {tokens:.3f} tokens a step of {ms:.2f} ms")


@torch.inference_mode()
def continued(model: LlamaForCausalLM, prompts: list[Tensor], max_tokens: int, eos: int) -> list[Tensor]:
    """Each prompt and what the model chooses greedily behind it, up to the end token."""
    done = []
    for prompt in prompts:
        output = model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
        done.append(output[0])
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "model_repository/tensorrt_llm/1"
    parser.add_argument("--model", type=Path, default=default, help="checkpoint of the demo model (default: that of the repository)")
    parser.add_argument("--mtp", type=Path, help="checkpoint that train_mtp.py wrote")
    parser.add_argument("--eagle3", type=Path, help="checkpoint that train_eagle3.py wrote")
    parser.add_argument("--documents", type=int, default=300, help="texts, of which half choose the shapes of trees (default: %(default)s)")
    parser.add_argument("--width", type=int, default=160, help="most tokens of a text (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="most tokens behind a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=77, help="seed of the texts (default: %(default)s)")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    model = Model(read_weights(arguments.model / "model.safetensors"), Shape(config))
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    trained = {text for seed in (5, 6) for text in make_corpus.documents(20_000, seed)}
    texts = [text for text in make_corpus.documents(4 * arguments.documents, arguments.seed) if text not in trained][: arguments.documents]
    eos = config["eos_token_id"]
    encoded = [encoding.ids[: arguments.width] for encoding in tokenizer.encode_batch(texts)]
    prompts = [torch.tensor(ids[: max(4, len(ids) // 3)]) for ids in encoded]
    sequences = continued(LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval(), prompts, arguments.max_tokens, eos)
    starts = [len(prompt) - 1 for prompt in prompts]
    drafters = {"mtp": arguments.mtp and Mtp(model, arguments.mtp), "eagle3": arguments.eagle3 and Eagle3(model, arguments.eagle3)}
    for name, drafter in drafters.items():
        if drafter:
            report(name, drafter, sequences, starts)


if __name__ == "__main__":
    main()
