#!/usr/bin/env python3
"""Trains an MTP head for the demo model and writes a checkpoint with both, so that `mtp_num_tokens` has something to accept.

    train_mtp.py --output DIR [--model model_repository/tensorrt_llm/1] [--seconds 240]

The model stays as it is. It is written as GLM-4.5 without sparse layers, a family that computes the same and has heads. The head learns
to predict the token behind the next one on the model's own corpus, from the model's hidden states. Forward and backward pass are written
out here; needs numpy and tokenizers. With --seconds 1300 --rows 8, on a part of a core, the head is right at four of five tokens.
"""

import argparse
import json
import shutil
import struct
import sys
import time
from pathlib import Path

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import numpy as np
from tokenizers import Tokenizer

import make_corpus

Array = np.ndarray


def read_weights(path: Path) -> dict[str, Array]:
    """Tensors in bf16, as f32."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    weights = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        words = np.frombuffer(data[start:end], "<u2").astype(np.uint32) << 16
        weights[name] = words.view(np.float32).reshape(entry["shape"]).copy()
    return weights


def write_weights(path: Path, weights: dict[str, Array]) -> None:
    """Numbers in bf16, integers and flags as they are."""
    header, stored = {}, []
    offset = 0
    for name, values in weights.items():
        match values.dtype:
            case np.bool_:
                dtype, data = "BOOL", values
            case np.int64:
                dtype, data = "I64", values.astype("<i8")
            case _:
                bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
                dtype, data = "BF16", ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        stored.append(data.tobytes())
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + len(stored[-1])]}
        offset += len(stored[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(stored))


class Shape:
    def __init__(self, config: dict):
        self.hidden, self.layers, self.eps = config["hidden_size"], config["num_hidden_layers"], config["rms_norm_eps"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.theta = config["rope_parameters"]["rope_theta"]


class Tape:
    """A forward pass that can be walked back. Each operation pushes the function that maps its output's gradient to its input's."""

    def __init__(self, weights: dict[str, Array], gradients: dict[str, Array] | None = None):
        self.weights, self.gradients = weights, gradients

    def linear(self, x: Array, name: str):
        weight = self.weights[name]

        def back(dy: Array) -> Array:
            self.gradients[name] += np.tensordot(dy, x, ([0, 1], [0, 1]))
            return dy @ weight

        return x @ weight.T, back

    def norm(self, x: Array, name: str, eps: float):
        weight = self.weights[name]
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        normed = x * scale

        def back(dy: Array) -> Array:
            self.gradients[name] += (dy * normed).sum((0, 1))
            scaled = dy * weight
            return scale * (scaled - normed * (scaled * normed).mean(-1, keepdims=True))

        return normed * weight, back


def rotate(x: Array, angles: tuple[Array, Array], sign: float = 1.0) -> Array:
    cos, sin = angles
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * cos - sign * second * sin, second * cos + sign * first * sin], -1)


def layer(tape: Tape, x: Array, prefix: str, shape: Shape):
    """A decoder layer of Llama for x [documents, tokens, hidden]."""
    (count, length, _), group = x.shape, shape.heads // shape.kv_heads
    frequencies = shape.theta ** (-np.arange(0, shape.dim, 2, dtype=np.float32) / shape.dim)
    products = np.outer(np.arange(length, dtype=np.float32), frequencies)[None, None]
    angles = (np.cos(products), np.sin(products))
    name = lambda part: f"{prefix}{part}.weight"
    split = lambda values: values.reshape(count, length, -1, shape.dim).transpose(0, 2, 1, 3)
    join = lambda values: values.transpose(0, 2, 1, 3).reshape(count, length, -1)

    normed, norm_back = tape.norm(x, name("input_layernorm"), shape.eps)
    (q, q_back), (k, k_back), (v, v_back) = (tape.linear(normed, name(f"self_attn.{part}_proj")) for part in "qkv")
    q, k, v = rotate(split(q), angles), rotate(split(k), angles), split(v)
    repeated = [np.repeat(part, group, 1) for part in (k, v)]
    scores = q @ repeated[0].transpose(0, 1, 3, 2) * shape.dim**-0.5
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -1e30)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    out, out_back = tape.linear(join(scores @ repeated[1]), name("self_attn.o_proj"))
    middle = x + out
    normed2, norm2_back = tape.norm(middle, name("post_attention_layernorm"), shape.eps)
    (gate, gate_back), (up, up_back) = (tape.linear(normed2, name(f"mlp.{part}_proj")) for part in ("gate", "up"))
    sigmoid = 1 / (1 + np.exp(-gate))
    down, down_back = tape.linear(gate * sigmoid * up, name("mlp.down_proj"))

    def back(dy: Array) -> Array:
        inner = down_back(dy)
        d_gate = inner * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
        d_middle = dy + norm2_back(gate_back(d_gate) + up_back(inner * gate * sigmoid))
        attended = split(out_back(d_middle))
        d_v = scores.transpose(0, 1, 3, 2) @ attended
        d_scores = attended @ repeated[1].transpose(0, 1, 3, 2)
        d_scores = scores * (d_scores - (d_scores * scores).sum(-1, keepdims=True)) * shape.dim**-0.5
        d_q, d_k = d_scores @ repeated[0], d_scores.transpose(0, 1, 3, 2) @ q
        d_k, d_v = (part.reshape(count, shape.kv_heads, group, length, shape.dim).sum(2) for part in (d_k, d_v))
        d_q, d_k = rotate(d_q, angles, -1.0), rotate(d_k, angles, -1.0)
        return d_middle + norm_back(q_back(join(d_q)) + k_back(join(d_k)) + v_back(join(d_v)))

    return middle + down, back


def hidden_states(weights: dict[str, Array], tokens: Array, shape: Shape) -> Array:
    """Behind the model's last norm."""
    tape = Tape(weights)
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(shape.layers):
        x, _ = layer(tape, x, f"model.layers.{index}.", shape)
    return tape.norm(x, "model.norm.weight", shape.eps)[0]


class Head:
    """An MTP head of DeepSeek's form, and Adam."""

    def __init__(self, model: dict[str, Array], shape: Shape, seed: int):
        self.shape, self.embedding, self.prefix = shape, model["model.embed_tokens.weight"], f"model.layers.{shape.layers}."
        # It begins as the model's last layer, which has seen such hidden states.
        last = f"model.layers.{shape.layers - 1}."
        self.weights = {self.prefix + name.removeprefix(last): values.copy() for name, values in model.items() if name.startswith(last)}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.weights[f"{self.prefix}{name}.weight"] = np.ones(shape.hidden, np.float32)
        noise = np.random.default_rng(seed).standard_normal((shape.hidden, 2 * shape.hidden), np.float32)
        self.weights[f"{self.prefix}eh_proj.weight"] = 0.5 * (2 * shape.hidden) ** -0.5 * noise
        self.moments = {name: [np.zeros_like(values), np.zeros_like(values)] for name, values in self.weights.items()}
        self.step = 0

    def logits(self, states: Array, following: Array):
        """For each position, from its hidden state and the token behind it."""
        self.gradients = {name: np.zeros_like(values) for name, values in self.weights.items()}
        tape, hidden = Tape(self.weights, self.gradients), self.shape.hidden
        name = lambda part: f"{self.prefix}{part}.weight"
        embedded, embedded_back = tape.norm(self.embedding[following], name("enorm"), self.shape.eps)
        normed, normed_back = tape.norm(states, name("hnorm"), self.shape.eps)
        x, x_back = tape.linear(np.concatenate([embedded, normed], -1), name("eh_proj"))
        x, layer_back = layer(tape, x, self.prefix, self.shape)
        x, out_back = tape.norm(x, name("shared_head.norm"), self.shape.eps)

        def back(d_logits: Array) -> None:
            both = x_back(layer_back(out_back(d_logits @ self.embedding)))
            embedded_back(both[..., :hidden])
            normed_back(both[..., hidden:])

        return x @ self.embedding.T, back

    def update(self, rate: float) -> None:
        self.step += 1
        size = np.sqrt(sum(float((gradient**2).sum()) for gradient in self.gradients.values()))
        for name, gradient in self.gradients.items():
            gradient = gradient * min(1.0, 1.0 / (size + 1e-9))
            first, second = self.moments[name]
            first += 0.1 * (gradient - first)
            second += 0.02 * (gradient**2 - second)
            mean, square = first / (1 - 0.9**self.step), second / (1 - 0.98**self.step)
            self.weights[name] -= rate * mean / (np.sqrt(square) + 1e-8)


def batches(tokenizer: Tokenizer, texts: list[str], eos: int, size: int, width: int, seed: int):
    """Documents of like length side by side: tokens [size, length], and which of them count."""
    random = np.random.default_rng(seed)
    encoded = [encoding.ids[: width - 1] + [eos] for encoding in tokenizer.encode_batch_fast(texts)]
    encoded.sort(key=len)
    groups = [encoded[first : first + size] for first in range(0, len(encoded) - size, size)]
    while True:
        for index in random.permutation(len(groups)):
            length = max(len(ids) for ids in groups[index])
            tokens = np.array([ids + [eos] * (length - len(ids)) for ids in groups[index]])
            if length > 3:
                yield tokens, np.array([[position < len(ids) for position in range(length)] for ids in groups[index]])


def train(head: Head, model: dict[str, Array], data, seconds: float, rate: float) -> None:
    start, seen, right, counted = time.monotonic(), 0, 0.0, 0.0
    while (done := (time.monotonic() - start) / seconds) < 1:
        tokens, counts = next(data)
        states = hidden_states(model, tokens[:, :-2], head.shape)
        logits, back = head.logits(states, tokens[:, 1:-1])
        targets, weights = tokens[:, 2:], counts[:, 2:].astype(np.float32)
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        right += ((logits.argmax(-1) == targets) * weights).sum()
        counted += weights.sum()
        gradient = probabilities
        np.put_along_axis(gradient, targets[..., None], np.take_along_axis(gradient, targets[..., None], -1) - 1, -1)
        back(gradient * (weights / weights.sum())[..., None])
        head.update(rate * min(1.0, (head.step + 1) / 50) * (1.0 if done < 0.5 else 2 - 2 * done))
        seen += int(weights.sum())
        if head.step % 50 == 0:
            print(f"step {head.step}: {right / counted:.1%} right, {seen / (time.monotonic() - start):.0f} tokens/s", flush=True)
            right = counted = 0.0


def save(directory: Path, source: Path, config: dict, model: dict[str, Array], head: Head) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, directory / file.name)
    rope = config["rope_parameters"] | {"partial_rotary_factor": 1.0}
    config = config | dict(
        architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", first_k_dense_replace=head.shape.layers, n_routed_experts=2,
        num_experts_per_tok=1, n_shared_experts=1, n_group=1, topk_group=1, moe_intermediate_size=64, norm_topk_prob=True,
        routed_scaling_factor=1.0, use_qk_norm=False, rope_parameters=rope, num_nextn_predict_layers=1,
    )
    for field in ("mlp_bias", "pretraining_tp"):
        config.pop(field, None)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_weights(directory / "model.safetensors", model | head.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "model_repository/tensorrt_llm/1"
    parser.add_argument("--model", type=Path, default=default, help="checkpoint of the demo model (default: that of the repository)")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--seconds", type=float, default=240, help="how long it trains (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=20_000, help="size of the corpus (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="documents per step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=160, help="most tokens of a document (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=5, help="seed of corpus, weights and order (default: %(default)s)")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    shape, model = Shape(config), read_weights(arguments.model / "model.safetensors")
    head = Head(model, shape, arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    texts = make_corpus.documents(arguments.documents, arguments.seed)
    data = batches(tokenizer, texts, config["eos_token_id"], arguments.rows, arguments.width, arguments.seed)
    train(head, model, data, arguments.seconds, arguments.rate)
    save(arguments.output, arguments.model, config, model, head)


if __name__ == "__main__":
    main()
