#!/usr/bin/env python3
"""Compares what `cuda_generate --guesses N` has guessed with the formula of the model's MTP head in fp32, guess by guess.

    check_gpu_guesses.py CHECKPOINT OUT.json [OUT.json ...]

transformers computes the hidden states; it does not run the head, so its layer is a model of one layer of the same family, whose inputs
are those of the head. Each guess is compared with the logits behind the guesses before it: it must be the likeliest token, or one that is
less likely by no more than the error of bf16 allows, which is estimated with the same pass in bf16. For shapes with weights under `mtp.`.
"""
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


class Head:
    """A model and its head in one type."""

    def __init__(self, checkpoint, dtype):
        reference = checkpoint / "reference"
        folder = reference if reference.is_dir() else checkpoint
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
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


def samples(sequence):
    """Some of the tokens and the guesses behind them."""
    for num_outputs, guesses in sequence["guesses"]:
        if guesses and num_outputs % 3 < 2:
            yield sequence["prompt"] + sequence["tokens"][:num_outputs], guesses


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    checkpoint, failed, logits = pathlib.Path(sys.argv[1]), False, {}
    torch.backends.cuda.matmul.allow_tf32 = False
    outputs = {path: json.load(open(path))["sequences"] for path in sys.argv[2:]}
    for dtype in (torch.float32, torch.bfloat16):
        head = Head(checkpoint, dtype)
        for path, sequences in outputs.items():
            logits[path, dtype] = []
            for sequence in sequences:
                hidden = head.hidden((sequence["prompt"] + sequence["tokens"])[:-1])
                found = [head.logits(tokens, hidden[:len(tokens) - 1], guesses) for tokens, guesses in samples(sequence)]
                logits[path, dtype] += found
        del head
        torch.cuda.empty_cache()
    for path, sequences in outputs.items():
        guesses = [torch.tensor(guesses) for sequence in sequences for _, guesses in samples(sequence)]
        exact, rounded = (torch.cat(logits[path, dtype]) for dtype in (torch.float32, torch.bfloat16))
        guesses = torch.cat(guesses)[:, None]
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
