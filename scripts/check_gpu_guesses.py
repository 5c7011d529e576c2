#!/usr/bin/env python3
"""Compares what `cuda_generate --guesses N` has guessed with the formula of its drafter in fp32, guess by guess.

    check_gpu_guesses.py CHECKPOINT OUT.json [OUT.json ...] [--eagle3 DIR | --draft-model DIR] [--simple]

The drafter is the model's MTP head, an EAGLE-3 head, or a smaller model. transformers computes the hidden states; it runs no MTP head, so
its layer is a model of one layer of the same family, whose inputs are those of the head. An EAGLE-3 head is written out here. Each guess is
compared with the logits behind the guesses before it: it must be the likeliest token, or one that is less likely by no more than the error of
bf16 allows, which is estimated with the same pass in bf16.

GPUs guess from a copy of the output head in e4m3, so the rows of the formula's head are rounded to it. With the simple kernels (--simple),
and for draft models, it is the head itself.
"""
import argparse
import copy
import json
import pathlib
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 6  # Most errors of bf16 by which a guess may be behind.


def load_model(checkpoint, dtype):
    """A model, and its folder with weights as transformers reads them."""
    reference = checkpoint / "reference"
    folder = reference if reference.is_dir() else checkpoint
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval(), folder


def in_e4m3(head):
    """The rows of a head, each in e4m3 with a scale."""
    scales = head.float().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return ((head.float() / scales).to(torch.float8_e4m3fn).float() * scales).to(head.dtype)


class Mtp:
    """A model and its MTP head in one type. `form` is applied to the output head."""

    def __init__(self, checkpoint, _, dtype, form):
        self.model, folder = load_model(checkpoint, dtype)
        # Embeddings that are tied to the head stay.
        self.model.lm_head.weight = torch.nn.Parameter(form(self.model.lm_head.weight.data))
        tensors = {name.removeprefix("mtp."): tensor.to(DEVICE, dtype)
                   for name, tensor in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}
        config = copy.deepcopy(self.model.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self.layer = type(self.model.model)(config).to(DEVICE, dtype).eval()
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(("layers.", "norm."))}
        # Experts are stored one by one.
        for part, sources in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            prefix = "layers.0.mlp.experts"
            if f"{prefix}.0.{sources[0]}.weight" in own:
                pop = lambda expert: torch.cat([own.pop(f"{prefix}.{expert}.{source}.weight") for source in sources])
                own[f"{prefix}.{part}"] = torch.stack([pop(expert) for expert in range(config.num_experts)])
        missing, unexpected = self.layer.load_state_dict(own, strict=False)
        missing = [name for name in missing if not name.startswith("embed_tokens") and "inv_freq" not in name]
        assert not missing and not unexpected, (missing, unexpected)
        self.fc = tensors["fc.weight"]
        self.norms = [self.norm(tensors[f"pre_fc_norm_{name}.weight"]) for name in ("embedding", "hidden")]

    def norm(self, weight):
        norm = type(self.model.model.norm)(len(weight), eps=self.model.config.rms_norm_eps).to(weight.device, weight.dtype)
        norm.weight.data = weight
        return norm

    @torch.no_grad()
    def hidden(self, tokens):
        """Behind the last norm, [T, E]."""
        return self.model.model(torch.tensor([tokens], device=DEVICE)).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, tokens, hidden, guesses):
        """The logits of each guess behind `tokens`, of which the last one's hidden state is not among `hidden`."""
        states, following, found = hidden, list(tokens[1:]), []
        for guess in guesses:
            embedded = self.model.model.embed_tokens(torch.tensor(following, device=DEVICE))
            inputs = torch.cat([self.norms[0](embedded), self.norms[1](states)], -1) @ self.fc.T
            last = self.layer(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0, -1:]
            found.append(self.model.lm_head(last)[0].float().cpu())
            states = torch.cat([states, last])
            following.append(guess)
        return torch.stack(found)

    def columns(self, guesses):
        """The columns of guesses in the logits."""
        return guesses


class Eagle3(Mtp):
    """A model and an EAGLE-3 head with a checkpoint of its own."""

    def __init__(self, checkpoint, folder, dtype, form):
        self.model, _ = load_model(checkpoint, dtype)
        config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        self.layer = config.get("transformer_layer_config", config)
        count = self.model.config.num_hidden_layers
        self.taps = config.get("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
        if "eagle_config" in config:  # Layers whose outputs are taken.
            self.taps = [tap + 1 for tap in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        self.norm_before_residual, self.fc_norm, self.norm_before_fc, self.norm_output = (
            config.get(flag, False) for flag in ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"))
        offsets = stored.pop("d2t")
        self.ids = {int(token): index for index, token in enumerate(offsets + torch.arange(len(offsets)))}
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in stored else "layers.0."
        self.weights = {name.removeprefix(prefix).removesuffix(".weight"): tensor.to(DEVICE, dtype) for name, tensor in stored.items()}
        self.weights["lm_head"] = form(self.weights["lm_head"])
        self.embedding = self.weights.get("embed_tokens", self.model.model.embed_tokens.weight)

    def columns(self, guesses):
        return torch.tensor([self.ids[int(guess)] for guess in guesses])

    def linear(self, x, name):
        return x @ self.weights[name].T

    def rms(self, x, name):
        scale = (x.float().pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        return self.weights[name] * (x.float() * scale).to(x.dtype)

    def attention(self, x):
        dim, heads = self.layer["head_dim"], self.layer["num_attention_heads"]
        split = lambda part: self.linear(x, f"self_attn.{part}_proj").unflatten(-1, (-1, dim)).transpose(0, 1)
        theta = self.layer.get("rope_theta") or self.layer["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
        angles = torch.arange(len(x), device=DEVICE)[:, None] * frequencies
        cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angles.cos(), angles.sin()))
        rotate = lambda y: y * cos + torch.cat([-y[..., dim // 2:], y[..., :dim // 2]], -1) * sin
        q, k, v = rotate(split("q")), rotate(split("k")), split("v")
        k, v = (part.repeat_interleave(heads // len(part), 0) for part in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return self.linear(attended.transpose(0, 1).flatten(1), "self_attn.o_proj")

    @torch.no_grad()
    def hidden(self, tokens):
        states = self.model.model(torch.tensor([tokens], device=DEVICE), output_hidden_states=True).hidden_states
        states = [states[tap][0] for tap in self.taps]
        if self.fc_norm:
            states = [self.rms(state, f"fc_norm.{index}") for index, state in enumerate(states)]
        joined = torch.cat(states, -1)
        return self.linear(self.rms(joined, "input_norm") if self.norm_before_fc else joined, "fc")

    @torch.no_grad()
    def logits(self, tokens, hidden, guesses):
        states, following, found = hidden, list(tokens[1:]), []
        for guess in guesses:
            normed = self.rms(states, "hidden_norm")
            embedded = self.embedding[torch.tensor(following, device=DEVICE)]
            x = normed if self.norm_before_residual else states
            x = x + self.attention(torch.cat([self.rms(embedded, "input_layernorm"), normed], -1))
            inner = self.rms(x, "post_attention_layernorm")
            inner = torch.nn.functional.silu(self.linear(inner, "mlp.gate_proj")) * self.linear(inner, "mlp.up_proj")
            x = x + self.linear(inner, "mlp.down_proj")
            last = self.rms(x[-1:], "norm")
            found.append(self.linear(last[0], "lm_head").float().cpu())
            states = torch.cat([states, last if self.norm_output else x[-1:]])
            following.append(guess)
        return torch.stack(found)


class DraftModel(Mtp):
    """A smaller model alone."""

    def __init__(self, _, folder, dtype, form):
        self.model, _ = load_model(folder, dtype)

    def hidden(self, tokens):
        return tokens

    @torch.no_grad()
    def logits(self, tokens, _, guesses):
        text = torch.tensor([list(tokens) + guesses[:-1]], device=DEVICE)
        table = self.model.get_input_embeddings().weight
        # Tokens that only the model has are zero.
        embedded = table[text.clamp(max=len(table) - 1)] * (text < len(table))[..., None]
        return self.model(inputs_embeds=embedded, logits_to_keep=len(guesses)).logits[0].float().cpu()


def samples(sequence):
    """Some of the tokens and the guesses behind them."""
    for num_outputs, guesses in sequence["guesses"]:
        if guesses and num_outputs % 3 < 2:
            yield sequence["prompt"] + sequence["tokens"][:num_outputs], guesses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("outputs", nargs="+")
    parser.add_argument("--eagle3", type=pathlib.Path)
    parser.add_argument("--draft-model", type=pathlib.Path)
    parser.add_argument("--simple", action="store_true")
    arguments = parser.parse_args()
    drafter = Eagle3 if arguments.eagle3 else DraftModel if arguments.draft_model else Mtp
    form = (lambda head: head) if arguments.simple else in_e4m3
    failed, logits, columns = False, {}, {}
    torch.backends.cuda.matmul.allow_tf32 = False
    outputs = {path: json.load(open(path))["sequences"] for path in arguments.outputs}
    for dtype in (torch.float32, torch.bfloat16):
        head = drafter(arguments.checkpoint, arguments.eagle3 or arguments.draft_model, dtype, form)
        for path, sequences in outputs.items():
            logits[path, dtype] = []
            guesses = [torch.tensor(guesses) for sequence in sequences for _, guesses in samples(sequence)]
            columns[path] = head.columns(torch.cat(guesses))[:, None]
            for sequence in sequences:
                hidden = head.hidden((sequence["prompt"] + sequence["tokens"])[:-1])
                found = [head.logits(tokens, hidden[:len(tokens) - 1], guesses) for tokens, guesses in samples(sequence)]
                logits[path, dtype] += found
        del head
        torch.cuda.empty_cache()
    for path, sequences in outputs.items():
        guesses = columns[path]
        exact, rounded = (torch.cat(logits[path, dtype]) for dtype in (torch.float32, torch.bfloat16))
        behind = exact.max(-1).values - exact.gather(-1, guesses)[:, 0]
        error = (rounded - exact).pow(2).mean().sqrt().item()
        worst, differ = behind.max().item(), int((behind > 0).sum())
        theirs = int((rounded.argmax(-1) != exact.argmax(-1)).sum())
        good = worst <= LIMIT * error and differ <= 1.5 * theirs + 5
        failed |= not good
        print(f"{'ok  ' if good else 'FAIL'} {path}: error of bf16 {error:.2e}, {differ} of {len(guesses)} guesses behind fp32's (transformers "
              f"bf16 {theirs}), by at most {worst:.2e}; spread of logits {exact.std().item():.2e}")
    sys.exit(1 if failed else 0)


main()
