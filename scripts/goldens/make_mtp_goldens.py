#!/usr/bin/env python3
"""Makes tiny checkpoints with MTP heads, with the greedy tokens of the model and the guesses of the head in fp32.

    make_mtp_goldens.py [OUT_DIR]          default: tests/goldens beside this script's parent folder

transformers does not run these heads, so the reference is the forward pass written out here, of the whole text each time and without a
cache. Each case is a folder: config.json, model.safetensors in half precision, and golden.json. That has for each prompt the greedy
tokens; and for each of them the guesses at the tokens behind it with the margin between their two highest logits, and the same margin
of the model's own choice.

The weights are random, but a layer adds little to the hidden state, and the head passes the embedding on. So the model's choice depends
mostly on the last token, and the head is often right. Seeds are fixed, so the files are reproducible. Needs numpy alone.
"""
import argparse
import json
import pathlib
import struct
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import numpy as np

NUM_TOKENS, NUM_GUESSES, PROMPT_LENS = 24, 3, (1, 7, 40)
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, LAYERS, EPS, THETA = 64, 104, 200, 4, 2, 2, 1e-5, 10000.0
COMMON = dict(dtype="float16", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
              num_attention_heads=HEADS, hidden_act="silu", max_position_embeddings=256, rms_norm_eps=EPS,
              tie_word_embeddings=False, rope_parameters={"rope_theta": THETA, "rope_type": "default"}, attention_bias=False,
              bos_token_id=1, eos_token_id=2)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def angles(length, dim):
    frequencies = THETA ** (-np.arange(0, dim, 2) / dim)
    products = np.outer(np.arange(length), frequencies)
    return np.cos(products)[:, None], np.sin(products)[:, None]  # [T, 1, dim / 2]


def attend(q, k, v, scale):
    """Causal attention of q, k and v, [T, heads, dim] each."""
    scores = np.einsum("thd,shd->hts", q, k) * scale
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    return np.einsum("hts,shd->thd", softmax(scores), v)


class Model:
    """A model whose forward pass uses only weights by their names in the checkpoint."""

    def __init__(self, seed):
        self.random, self.weights = np.random.default_rng(seed), {}

    def add(self, name, shape, scale):
        """Random values that half precision holds."""
        values = (self.random.standard_normal(shape) * scale).astype(np.float16)
        self.weights[name] = values.astype(np.float32)

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x, name, eps=EPS):
        weight = self.weights[f"{name}.weight"] + self.norm_offset
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def add_norm(self, name, width=HIDDEN):
        self.add(f"{name}.weight", width, 0.1)
        self.weights[f"{name}.weight"] = (self.weights[f"{name}.weight"] + 1 - self.norm_offset).astype(np.float16).astype(np.float32)

    def add_linear(self, name, rows, cols, gain=1.2):
        self.add(f"{name}.weight", (rows, cols), gain * cols ** -0.5)

    def add_mlp(self, name, inner):
        for part in ("gate_proj", "up_proj"):
            self.add_linear(f"{name}.{part}", inner, HIDDEN)
        self.add_linear(f"{name}.down_proj", HIDDEN, inner, 0.1)

    def mlp(self, x, name):
        return self.linear(silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def layer(self, x, name):
        x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        return x + self.feed_forward(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")

    def add_model(self):
        self.add("model.embed_tokens.weight", (VOCAB, HIDDEN), 1.0)
        self.add("lm_head.weight", (VOCAB, HIDDEN), 1.0)
        self.add_norm("model.norm")
        for index in range(LAYERS):
            self.add_layer(f"model.layers.{index}", index)

    def add_input(self, name):
        """The matrix of both inputs of the head, which passes the embedding on."""
        self.add_linear(name, HIDDEN, 2 * HIDDEN, 0.15)
        passed = np.eye(HIDDEN, 2 * HIDDEN, dtype=np.float32)
        self.weights[f"{name}.weight"] = (self.weights[f"{name}.weight"] + passed).astype(np.float16).astype(np.float32)

    def hidden(self, tokens):
        """Behind the last norm, [T, E]."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for index in range(LAYERS):
            x = self.layer(x, f"model.layers.{index}")
        return self.norm(x, "model.norm")

    def guesses(self, tokens, hidden):
        """Guesses behind `tokens`, of which the last has no hidden state yet, and their margins."""
        states, following, guesses, margins = list(hidden), list(tokens[1:]), [], []
        for _ in range(NUM_GUESSES):
            summed, normed = self.head(self.weights["model.embed_tokens.weight"][following], np.array(states))
            guess, margin = best(self.linear(normed[-1], "lm_head"))
            guesses.append(guess)
            margins.append(margin)
            states.append(normed[-1] if self.goes_on_behind_norm else summed[-1])
            following.append(guess)
        return guesses, margins


class Qwen(Model):
    """Qwen3.5 without recurrent layers: an output gate, a quarter of each head rotated, norms as differences from one."""

    norm_offset, goes_on_behind_norm, dim, rotated = 1, True, 32, 8
    config = COMMON | dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", num_key_value_heads=KV_HEADS, head_dim=32,
                           layer_types=["full_attention"] * LAYERS, linear_conv_kernel_dim=4, linear_key_head_dim=16,
                           linear_value_head_dim=24, linear_num_key_heads=4, linear_num_value_heads=4, mtp_num_hidden_layers=1,
                           mtp_use_dedicated_embeddings=False)
    config = config | dict(rope_parameters=config["rope_parameters"] | {"partial_rotary_factor": 0.25})

    def add_layer(self, name, _index):
        for norm, width in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN), ("self_attn.q_norm", self.dim),
                            ("self_attn.k_norm", self.dim)):
            self.add_norm(f"{name}.{norm}", width)
        for part, heads in (("q_proj", 2 * HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            self.add_linear(f"{name}.self_attn.{part}", heads * self.dim, HIDDEN)
        self.add_linear(f"{name}.self_attn.o_proj", HIDDEN, HEADS * self.dim, 0.1)
        self.add_mlp(f"{name}.mlp", INNER)

    def rotate(self, x):
        (cos, sin), half = angles(len(x), self.rotated), self.rotated // 2
        first, second, rest = x[..., :half], x[..., half:self.rotated], x[..., self.rotated:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def attention(self, x, name):
        heads = lambda part: self.linear(x, f"{name}.{part}").reshape(len(x), -1, self.dim)
        both = heads("q_proj").reshape(len(x), HEADS, 2, self.dim)
        q, gate = self.rotate(self.norm(both[:, :, 0], f"{name}.q_norm")), both[:, :, 1]
        k, v = self.rotate(self.norm(heads("k_proj"), f"{name}.k_norm")), heads("v_proj")
        k, v = (np.repeat(part, HEADS // KV_HEADS, 1) for part in (k, v))
        attended = attend(q, k, v, self.dim ** -0.5) * sigmoid(gate)
        return self.linear(attended.reshape(len(x), -1), f"{name}.o_proj")

    feed_forward = Model.mlp

    def add_head(self):
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.add_norm(f"mtp.{norm}")
        self.add_input("mtp.fc")
        self.add_layer("mtp.layers.0", LAYERS)

    def head(self, embedded, states):
        x = np.concatenate([self.norm(embedded, "mtp.pre_fc_norm_embedding"), self.norm(states, "mtp.pre_fc_norm_hidden")], -1)
        summed = self.layer(self.linear(x, "mtp.fc"), "mtp.layers.0")
        return summed, self.norm(summed, "mtp.norm")


class DeepSeek(Model):
    """DeepSeek V3: latent vectors of keys and values, a dense layer, and one of experts beside one for all tokens."""

    norm_offset, goes_on_behind_norm = 0, False
    nope, rope, value, rank, experts, chosen, inner, scale = 24, 16, 40, 32, 8, 3, 56, 1.5
    config = COMMON | dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_key_value_heads=HEADS,
                           kv_lora_rank=rank, q_lora_rank=None, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
                           n_routed_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=inner, n_shared_experts=1,
                           first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=scale, norm_topk_prob=True,
                           rope_interleave=True, num_nextn_predict_layers=1)

    def add_layer(self, name, index):
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        self.add_norm(f"{name}.input_layernorm")
        self.add_norm(f"{name}.post_attention_layernorm")
        self.add_norm(f"{attention}.kv_a_layernorm", self.rank)
        self.add_linear(f"{attention}.q_proj", HEADS * (self.nope + self.rope), HIDDEN)
        self.add_linear(f"{attention}.kv_a_proj_with_mqa", self.rank + self.rope, HIDDEN)
        self.add_linear(f"{attention}.kv_b_proj", HEADS * (self.nope + self.value), self.rank)
        self.add_linear(f"{attention}.o_proj", HIDDEN, HEADS * self.value, 0.1)
        if index == 0:
            return self.add_mlp(mlp, INNER)
        self.add_linear(f"{mlp}.gate", self.experts, HIDDEN)
        self.add(f"{mlp}.gate.e_score_correction_bias", self.experts, 0.3)
        for expert in ["shared_experts", *(f"experts.{index}" for index in range(self.experts))]:
            self.add_mlp(f"{mlp}.{expert}", self.inner)

    def rotate(self, x):
        cos, sin = angles(len(x), self.rope)
        first, second = x[..., 0::2], x[..., 1::2]
        return np.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)

    def attention(self, x, name):
        q = self.linear(x, f"{name}.q_proj").reshape(len(x), HEADS, -1)
        latent = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        normed = self.norm(latent[:, :self.rank], f"{name}.kv_a_layernorm", 1e-6)
        k, v = np.split(self.linear(normed, f"{name}.kv_b_proj").reshape(len(x), HEADS, -1), [self.nope], -1)
        shared = np.repeat(self.rotate(latent[:, None, self.rank:]), HEADS, 1)
        q = np.concatenate([q[..., :self.nope], self.rotate(q[..., self.nope:])], -1)
        attended = attend(q, np.concatenate([k, shared], -1), v, (self.nope + self.rope) ** -0.5)
        return self.linear(attended.reshape(len(x), -1), f"{name}.o_proj")

    def feed_forward(self, x, name):
        if f"{name}.gate.weight" not in self.weights:
            return self.mlp(x, name)
        scores = sigmoid(self.linear(x, f"{name}.gate"))
        order = np.argsort(-(scores + self.weights[f"{name}.gate.e_score_correction_bias"]), -1, kind="stable")
        out = self.mlp(x, f"{name}.shared_experts")
        for token, chosen in enumerate(order[:, :self.chosen]):
            total = scores[token, chosen].sum() + 1e-20
            for expert in chosen:
                product = self.mlp(x[token], f"{name}.experts.{expert}")
                out[token] += product * scores[token, expert] / total * self.scale
        return out

    def add_head(self):
        name = f"model.layers.{LAYERS}"
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            self.add_norm(f"{name}.{norm}")
        self.add_input(f"{name}.eh_proj")
        self.add_layer(name, LAYERS)

    def head(self, embedded, states):
        name = f"model.layers.{LAYERS}"
        x = np.concatenate([self.norm(embedded, f"{name}.enorm"), self.norm(states, f"{name}.hnorm")], -1)
        summed = self.layer(self.linear(x, f"{name}.eh_proj"), name)
        return summed, self.norm(summed, f"{name}.shared_head.norm")


CASES = {"mtp_qwen3_5": Qwen, "mtp_deepseek_v3": DeepSeek}


def best(logits):
    """The likeliest token, and how far the next is behind."""
    second, first = np.sort(logits)[-2:]
    return int(np.argmax(logits)), round(float(first - second), 5)


def golden(model, prompt):
    tokens, margins, guesses = list(prompt), [], []
    for _ in range(NUM_TOKENS):
        hidden = model.hidden(tokens)
        token, margin = best(model.linear(hidden[-1], "lm_head"))
        tokens.append(token)
        margins.append(margin)
        guesses.append(model.guesses(tokens, hidden))
    return {"prompt": prompt, "tokens": tokens[len(prompt):], "margins": margins, "guesses": [guess for guess, _ in guesses],
            "guess_margins": [margin for _, margin in guesses]}


def save(folder, model):
    header, data = {}, b""
    for name, values in model.weights.items():
        stored = values.astype("<f2").tobytes()
        header[name] = {"dtype": "F16", "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path(__file__).resolve().parents[2] / "tests/goldens"
    parser.add_argument("out_dir", nargs="?", type=pathlib.Path, default=default)
    out_dir = parser.parse_args().out_dir
    for seed, (name, make) in enumerate(CASES.items()):
        model = make(seed)
        model.add_model()
        model.add_head()
        save(out_dir / name, model)
        prompts = [[int(token) for token in model.random.integers(3, VOCAB, length)] for length in PROMPT_LENS]
        sequences = [golden(model, prompt) for prompt in prompts]
        (out_dir / name / "golden.json").write_text(json.dumps({"sequences": sequences}) + "\n")
        right = [guess == token for one in sequences for guesses, *following in zip(one["guesses"], *(one["tokens"][k:] for k in (1, 2, 3)))
                 for guess, token in zip(guesses, following)]
        print(f"{name}: {sum(right)} of {len(right)} guesses are right")


if __name__ == "__main__":
    main()
