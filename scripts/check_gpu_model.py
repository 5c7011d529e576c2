#!/usr/bin/env python3
"""Compares the output of cuda_generate with transformers on the same GPU, token by token.

    check_gpu_model.py [--kv-cache fp8|int8] CHECKPOINT OUT.json [OUT.json ...]

Each sequence, prompt and generated tokens, is run through transformers in fp32 and in bf16. The errors against fp32 must be similar to
those of transformers' bf16: over the 20 likeliest log-probabilities, the root mean square at most 1.25 times as large, and the maximum
at most twice as large. If the checkpoint was made for inputs of layers in fp8, those of transformers' bf16 are rounded to it. Each generated token must be the likeliest in fp32, or less likely by at most twice the maximum error.
Exits with 1 otherwise. A sequence may have an adapter, the folder of one that PEFT would save: its products are added to the layers' outputs. With --kv-cache, transformers' keys and values are rounded to 8 bits, too, with a scale for each token and head.
Needs torch and transformers.
"""
import json
import pathlib
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "goldens"))
from published import slopes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(checkpoint, dtype):
    config = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
    if config["model_type"] == "baichuan":
        return alibi_llama(checkpoint, config).to(dtype).to(DEVICE).eval()
    if (pathlib.Path(checkpoint) / "reference").is_dir():  # what transformers does not have, or quantized weights in fp32
        checkpoint = pathlib.Path(checkpoint) / "reference"
    # Some versions choose an implementation of attention that ignores caps of scores.
    own = {"attn_implementation": "eager"} if config.get("attn_logit_softcapping") else {}
    named = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, named).from_pretrained(checkpoint, dtype=dtype, **own).to(DEVICE).eval()
    if dtype == torch.bfloat16 and has_fp8_inputs(config.get("quantization_config", {})):
        for name, layer in model.named_modules():
            if name.endswith(("_proj", "_proj_qkv", "_proj_z", "kv_a_proj_with_mqa")):
                layer.register_forward_pre_hook(lambda _layer, inputs: (in_fp8(inputs[0]), *inputs[1:]))
    return model


def has_fp8_inputs(quantization):
    inputs = [group["input_activations"] or {} for group in quantization.get("config_groups", {}).values()]
    return quantization.get("quant_method") == "fp8" or any(each.get("type") == "float" for each in inputs)


def in_fp8(x):
    """Each 128 columns of a row, and what is left, in e4m3 with a scale of their own, as DeepSeek's format has them."""
    slices = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = slices.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((slices / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., :x.shape[-1]].to(x.dtype)


def alibi_llama(checkpoint, fields):
    """transformers' Llama with Baichuan's weights, without rotary embedding and with ALiBi as its mask."""
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "rms_norm_eps")
    config = LlamaConfig(tie_word_embeddings=False, **{key: fields[key] for key in kept})
    config._attn_implementation = "eager"  # adds a mask of fp32 in fp32
    tensors = load_file(pathlib.Path(checkpoint) / "model.safetensors")
    for name in [name for name in tensors if name.endswith("W_pack.weight")]:
        for part, rows in zip("qkv", tensors.pop(name).chunk(3)):
            tensors[name.replace("W_pack", f"{part}_proj")] = rows
    tensors["lm_head.weight"] = functional.normalize(tensors["lm_head.weight"].float()).to(tensors["lm_head.weight"].dtype)
    model = LlamaForCausalLM(config)
    model.load_state_dict(tensors)
    model.model.rotary_emb.register_forward_hook(lambda _m, _i, turn: (torch.ones_like(turn[0]), torch.zeros_like(turn[1])))
    model.alibi = slopes(config.num_attention_heads)
    return model


class RoundedCache(DynamicCache):
    """Keys and values in codes of 8 bits."""

    def __init__(self, form, config):
        super().__init__(config=config)
        self.form = form

    def rounded(self, x):
        exact = x.float()
        scale = exact.abs().amax(dim=-1, keepdim=True) / {"fp8": 448.0, "int8": 127.0}[self.form]
        codes = exact / torch.where(scale > 0, scale, 1.0)
        codes = codes.to(torch.float8_e4m3fn).float() if self.form == "fp8" else codes.round().clamp(-127, 127)
        return (codes * scale).to(x.dtype)

    def update(self, keys, values, *args, **options):
        return super().update(self.rounded(keys), self.rounded(values), *args, **options)


def log_probs(model, ids, kv_cache):
    mask = None
    if hasattr(model, "alibi"):
        positions = torch.arange(len(ids))
        distance = positions[None, :] - positions[:, None]
        mask = model.alibi[:, None, None] * distance + torch.where(distance > 0, float("-inf"), 0.0)
        mask = mask[None].to(DEVICE)
    cache = {"past_key_values": RoundedCache(kv_cache, model.config), "use_cache": True} if kv_cache else {}
    with torch.no_grad():
        return model(torch.tensor([ids], device=DEVICE), attention_mask=mask, **cache).logits[0].float().log_softmax(-1).cpu()


def with_adapter(model, folder):
    """Adds the products of an adapter to the outputs of the model's layers, as PEFT does; returns what takes them away again."""
    if not folder:
        return []
    folder = pathlib.Path(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {key.removeprefix("base_model.model."): value for key, value in load_file(folder / "adapter_model.safetensors").items()}
    layers, hooks = dict(model.named_modules()), []
    for name in {key.split(".lora_")[0] for key in tensors}:
        weight = layers[name].weight
        a, b = (tensors[f"{name}.lora_{part}.weight"].to(weight.dtype).to(DEVICE) for part in "AB")
        scale = config["lora_alpha"] / len(a)
        add = lambda _layer, inputs, out, a=a, b=b, scale=scale: out + scale * functional.linear(functional.linear(inputs[0], a), b)
        hooks.append(layers[name].register_forward_hook(add))
    return hooks


def errors(sequences, exact, rounded):
    ours, theirs, behind, differ = [], [], 0.0, 0
    for sequence, want, half in zip(sequences, exact, rounded):
        start = len(sequence["prompt"]) - 1
        for i, top in enumerate(sequence["top"]):
            row = want[start + i]
            ids = torch.tensor([t for t, _ in top])
            ours.append(torch.tensor([p for _, p in top]) - row[ids])
            theirs.append(half[start + i][ids] - row[ids])
            gap = (row.max() - row[sequence["tokens"][i]]).item()
            behind, differ = max(behind, gap), differ + (gap > 0)
    return torch.cat(ours).double(), torch.cat(theirs).double(), behind, differ


def main():
    arguments, kv_cache, failed = sys.argv[1:], None, False
    if arguments[:1] == ["--kv-cache"]:
        kv_cache, arguments = arguments[1], arguments[2:]
    if len(arguments) < 2:
        sys.exit(__doc__)
    checkpoint = arguments[0]
    torch.backends.cuda.matmul.allow_tf32 = False
    outputs = {path: json.load(open(path))["sequences"] for path in arguments[1:]}
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load(checkpoint, dtype)
        for path, sequences in outputs.items():
            logits[path, dtype] = []
            for sequence in sequences:
                hooks = with_adapter(model, sequence.get("adapter"))
                logits[path, dtype].append(log_probs(model, (sequence["prompt"] + sequence["tokens"])[:-1], kv_cache))
                for hook in hooks:
                    hook.remove()
        del model
        torch.cuda.empty_cache()
    for path, sequences in outputs.items():
        ours, theirs, behind, differ = errors(sequences, logits[path, torch.float32], logits[path, torch.bfloat16])
        rms, rms_hf = ours.pow(2).mean().sqrt().item(), theirs.pow(2).mean().sqrt().item()
        worst, worst_hf = ours.abs().max().item(), theirs.abs().max().item()
        good = rms <= 1.25 * rms_hf and worst <= 2 * worst_hf and behind <= 2 * worst
        failed |= not good
        print(f"{'ok  ' if good else 'FAIL'} {path}: error rms {rms:.2e} worst {worst:.2e} (transformers bf16 {rms_hf:.2e} {worst_hf:.2e}), "
              f"{differ} of {sum(len(s['tokens']) for s in sequences)} tokens behind fp32's, by at most {behind:.2e}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
