#!/usr/bin/env python3
"""Makes a tiny Llama and EAGLE-3 heads for it, with the greedy tokens of the model and the guesses of each head in fp32.

    make_eagle3_goldens.py [OUT_DIR]          default: tests/goldens beside this script's parent folder

The forward passes are those of make_mtp_goldens.py and of this file: of the whole text each time, and without a cache. The folder
`eagle3` has config.json and model.safetensors of the model, and golden.json; the folders in it have one head each:

    specforge     the form of SpecForge and EAGLE: `midlayer`, the embeddings of the model, the usual layers of the model
    speculators   the form of speculators: `layers.0`, embeddings of its own, other layers, `norm_before_residual`

The folder `eagle31` has heads of EAGLE-3.1 for the same model, and a golden.json of its own. They continue from the output behind the last
norm (`norm_output`):

    fc_norm         the form of SpecForge: a norm of each hidden state, four of them, whose layers `eagle_config` names by their outputs
    norm_before_fc  the form of speculators: one norm of all hidden states

golden.json has for each prompt the greedy tokens with the margin between their two highest logits, and for each head and each token the
guesses at the tokens behind it, with the same margin. Seeds are fixed, so the files are reproducible. Needs numpy alone.
"""
import argparse
import json
import pathlib
import struct
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import numpy as np

import make_mtp_goldens as mtp
from make_mtp_goldens import COMMON, EPS, HEADS, HIDDEN, INNER, KV_HEADS, NUM_GUESSES, NUM_TOKENS, PROMPT_LENS, VOCAB, angles, attend, best

LAYERS, DIM, DRAFT_VOCAB = 6, 16, 120


class Layered(mtp.Model):
    """Layers of Llama's form."""

    norm_offset = 0

    def add_attention(self, name, inputs, gain):
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            self.add_linear(f"{name}.{part}", heads * DIM, inputs)
        self.add_linear(f"{name}.o_proj", HIDDEN, HEADS * DIM, gain)

    def rotate(self, x):
        (cos, sin), half = angles(len(x), DIM), DIM // 2
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, x, name):
        q, k, v = (self.linear(x, f"{name}.{part}_proj").reshape(len(x), -1, DIM) for part in "qkv")
        k, v = (np.repeat(part, HEADS // KV_HEADS, 1) for part in (self.rotate(k), v))
        return self.linear(attend(self.rotate(q), k, v, DIM ** -0.5).reshape(len(x), -1), f"{name}.o_proj")


class Llama(Layered):
    config = COMMON | dict(architectures=["LlamaForCausalLM"], model_type="llama", num_key_value_heads=KV_HEADS, head_dim=DIM,
                           num_hidden_layers=LAYERS)

    def __init__(self, seed):
        super().__init__(seed)
        self.add("model.embed_tokens.weight", (VOCAB, HIDDEN), 1.0)
        self.add("lm_head.weight", (VOCAB, HIDDEN), 1.0)
        self.add_norm("model.norm")
        for index in range(LAYERS):
            name = f"model.layers.{index}"
            self.add_norm(f"{name}.input_layernorm")
            self.add_norm(f"{name}.post_attention_layernorm")
            self.add_attention(f"{name}.self_attn", HIDDEN, 0.3)
            self.add_mlp(f"{name}.mlp", INNER)

    feed_forward = mtp.Model.mlp

    def inputs(self, tokens):
        """The inputs of all layers and of the last norm, [LAYERS + 1, T, E]."""
        states = [self.weights["model.embed_tokens.weight"][tokens]]
        for index in range(LAYERS):
            states.append(self.layer(states[-1], f"model.layers.{index}"))
        return states


class Head(Layered):
    def __init__(self, seed, model, layer, taps, has_embedding=False, norm_before_residual=False, joined_norm=None, norm_output=False):
        super().__init__(seed)
        self.model, self.name, self.taps, self.norm_before_residual = model, layer, taps, norm_before_residual
        self.joined_norm, self.norm_output = joined_norm, norm_output
        self.add_linear("fc", HIDDEN, len(taps) * HIDDEN)
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.add_norm(f"{layer}.{norm}")
        self.add_attention(f"{layer}.self_attn", 2 * HIDDEN, 1.2)
        self.add_mlp(f"{layer}.mlp", INNER)
        self.add_norm("norm")
        self.add("lm_head.weight", (DRAFT_VOCAB, HIDDEN), 1.0)
        self.ids = np.sort(self.random.choice(VOCAB, DRAFT_VOCAB, replace=False))
        if has_embedding:
            self.add("embed_tokens.weight", (VOCAB, HIDDEN), 1.0)
        if joined_norm == "fc_norm":
            for index in range(len(taps)):
                self.add(f"fc_norm.{index}.weight", HIDDEN, 1.0)
        elif joined_norm == "norm_before_fc":
            self.add("input_norm.weight", len(taps) * HIDDEN, 1.0)

    def join(self, inputs):
        """The state of the head, of the inputs of layers."""
        states = [inputs[tap] for tap in self.taps]
        if self.joined_norm == "fc_norm":
            states = [self.norm(state, f"fc_norm.{index}") for index, state in enumerate(states)]
        joined = np.concatenate(states, -1)
        return self.linear(self.norm(joined, "input_norm") if self.joined_norm == "norm_before_fc" else joined, "fc")

    def run(self, following, states):
        """Behind the layer, before and behind the last norm."""
        table = self.weights.get("embed_tokens.weight", self.model.weights["model.embed_tokens.weight"])
        normed = self.norm(states, f"{self.name}.hidden_norm")
        both = np.concatenate([self.norm(table[following], f"{self.name}.input_layernorm"), normed], -1)
        x = normed if self.norm_before_residual else states
        x = x + self.attention(both, f"{self.name}.self_attn")
        x = x + self.mlp(self.norm(x, f"{self.name}.post_attention_layernorm"), f"{self.name}.mlp")
        return x, self.norm(x, "norm")

    def guesses(self, tokens, inputs):
        """Guesses behind `tokens`, of which the last has no hidden state yet, and their margins."""
        states, following, guesses, margins = list(self.join(inputs)), list(tokens[1:]), [], []
        for _ in range(NUM_GUESSES):
            summed, normed = self.run(following, np.array(states))
            index, margin = best(self.linear(normed[-1], "lm_head"))
            guesses.append(int(self.ids[index]))
            margins.append(margin)
            states.append(normed[-1] if self.norm_output else summed[-1])
            following.append(guesses[-1])
        return guesses, margins


def save_head(folder, head):
    """Its weights with the tables between both vocabularies."""
    mtp.save(folder, head)
    path = folder / "model.safetensors"
    stored = path.read_bytes()
    length = struct.unpack("<Q", stored[:8])[0]
    header, data = json.loads(stored[8:8 + length]), stored[8 + length:]
    offsets = head.ids - np.arange(DRAFT_VOCAB)
    for name, dtype, values in (("d2t", "I64", offsets.astype("<i8")), ("t2d", "BOOL", np.isin(np.arange(VOCAB), head.ids))):
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def heads(model):
    """The heads of each folder."""
    layer = {name: model.config[name] for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias", "dtype")}
    of_specforge = layer | dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, tie_word_embeddings=False,
                                draft_vocab_size=DRAFT_VOCAB, bos_token_id=1, eos_token_id=2)
    specforge = Head(11, model, "midlayer", [2, LAYERS // 2, LAYERS - 3])
    specforge.config = of_specforge
    fc_norm = Head(13, model, "midlayer", [2, 3, 4, 5], joined_norm="fc_norm", norm_output=True)
    fc_norm.config = of_specforge | dict(fc_norm=True, norm_output=True, num_aux_hidden_states=4, use_sliding_window=False, sliding_window=8,
                                         max_window_layers=6, eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4],
                                                                                use_aux_hidden_state=True, use_last_layernorm=True))

    def of_speculators(taps):
        return dict(
            architectures=["Eagle3Speculator"], speculators_model_type="eagle3", speculators_version="0.3.0", dtype="float16",
            draft_vocab_size=DRAFT_VOCAB, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=taps, target_hidden_size=None,
            transformer_layer_config=layer | dict(model_type="llama", num_hidden_layers=1),
            speculators_config={"algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": {"name_or_path": "eagle3"},
                                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_GUESSES}]})

    speculators = Head(12, model, "layers.0", [1, 4, 5], has_embedding=True, norm_before_residual=True)
    speculators.config = of_speculators([1, 4, 5])
    norm_before_fc = Head(14, model, "layers.0", [0, 3, 5], norm_before_residual=True, joined_norm="norm_before_fc", norm_output=True)
    norm_before_fc.config = of_speculators([0, 3, 5]) | dict(norm_before_fc=True, fc_norm=False, norm_output=True)
    return {"eagle3": {"specforge": specforge, "speculators": speculators}, "eagle31": {"fc_norm": fc_norm, "norm_before_fc": norm_before_fc}}


def golden(model, drafters, prompt):
    tokens, margins = list(prompt), []
    guesses = {name: {"guesses": [], "margins": []} for name in drafters}
    for _ in range(NUM_TOKENS):
        inputs = model.inputs(tokens)
        token, margin = best(model.linear(model.norm(inputs[-1][-1], "model.norm"), "lm_head"))
        tokens.append(token)
        margins.append(margin)
        for name, head in drafters.items():
            for key, values in zip(("guesses", "margins"), head.guesses(tokens, inputs)):
                guesses[name][key].append(values)
    return {"prompt": prompt, "tokens": tokens[len(prompt):], "margins": margins, "heads": guesses}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path(__file__).resolve().parents[2] / "tests/goldens"
    parser.add_argument("out_dir", nargs="?", type=pathlib.Path, default=default)
    out_dir = parser.parse_args().out_dir
    model = Llama(10)
    mtp.save(out_dir / "eagle3", model)
    drafters = heads(model)
    prompts = [[int(token) for token in model.random.integers(3, VOCAB, length)] for length in PROMPT_LENS]
    for name, own in drafters.items():
        for head_name, head in own.items():
            save_head(out_dir / name / head_name, head)
        sequences = [golden(model, own, prompt) for prompt in prompts]
        (out_dir / name / "golden.json").write_text(json.dumps({"sequences": sequences}) + "\n")
        print(f"{out_dir / name}: {len(sequences)} prompts, {len(own)} heads")


if __name__ == "__main__":
    main()
