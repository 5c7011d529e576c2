#!/usr/bin/env python3
"""Makes random LoRA adapters of tiny checkpoints with PEFT, with the outputs of transformers and PEFT for them in fp32.

    make_adapter_goldens.py [GOLDENS_DIR]          default: tests/goldens beside this script's parent folder

The checkpoints are those of make_goldens.py. `adapters/demo` is an adapter of the shipped demo model, with its greedy answer to a text. Each other case is a folder `adapters/NAME` with adapter_config.json,
adapter_model.safetensors and golden.json: the folder of the checkpoint, and the sequences as make_goldens.py writes them.
Seeds are fixed, so the files are reproducible. Needs torch, transformers, safetensors and peft.
"""
import argparse
import json
import pathlib
import zlib

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_goldens import golden

LLAMA = "mha_bias_f32"
LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]

# Name: checkpoint, dtype of the adapter's weights, settings.
CASES = {
    # two matrices of the fused q, k and v
    "llama_qv": (LLAMA, torch.float32, dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])),
    # all layers, scaled by the root of the rank
    "llama_all": (LLAMA, torch.bfloat16, dict(r=8, lora_alpha=4, use_rslora=True, target_modules="all-linear")),
    # ranks and factors of their own, modules by an expression
    "llama_patterns": (LLAMA, torch.float32, dict(
        r=5, lora_alpha=5, target_modules=r".*\.(k_proj|gate_proj|up_proj|down_proj|o_proj)",
        rank_pattern={"layers.1.mlp.up_proj": 12, "k_proj": 2}, alpha_pattern={"layers.0.*": 9})),
    # one tensor for q, k and v, one for gate and up; a part of each head is rotated
    "phi3_all": ("phi3", torch.float16, dict(r=8, lora_alpha=8, target_modules="all-linear")),
    # neighbouring pairs of a head are rotated
    "cohere_qk": ("cohere", torch.float32, dict(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj", "down_proj"])),
    # weights that are stored transposed, no gate
    "gpt2_all": ("gpt2", torch.float32, dict(r=6, lora_alpha=6, fan_in_fan_out=True,
                                             target_modules=["c_attn", "c_proj", "c_fc"])),
    # attention over latent vectors, with q from the layer's input and from a latent vector
    "deepseek_v2_attention": ("deepseek_v2", torch.float32, dict(r=4, lora_alpha=4, target_modules=LATENT)),
    "deepseek_v3_attention": ("deepseek_v3", torch.bfloat16, dict(r=4, lora_alpha=4, target_modules=LATENT)),
    # layers with a recurrent state, whose projections are separate or grouped by key heads
    "qwen3_5_all": ("qwen3_5", torch.float32, dict(r=4, lora_alpha=4, target_modules="all-linear")),
    "qwen3_next_attention": ("qwen3_next", torch.bfloat16, dict(r=4, lora_alpha=4, target_modules=[
        "in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"])),
    # models with heads that guess
    "mtp_deepseek_v3_attention": ("mtp_deepseek_v3", torch.float32, dict(r=2, lora_alpha=2, target_modules=LATENT)),
    "mtp_qwen3_5_all": ("mtp_qwen3_5", torch.float32, dict(r=2, lora_alpha=2, target_modules="all-linear")),
    "eagle3_all": ("eagle3", torch.float32, dict(r=2, lora_alpha=2, target_modules="all-linear")),
    # all linear layers but experts and routers
    "qwen2_moe_all": ("qwen2_moe", torch.float32, dict(
        r=4, lora_alpha=4, target_modules=r".*(self_attn\.[qkvo]_proj|shared_expert\.(gate|up|down)_proj)")),
    # Mamba-2, whose projections are one matrix
    "granite_hybrid_mamba": ("granite_hybrid_dense", torch.float32, dict(r=4, lora_alpha=4, target_modules=["in_proj", "out_proj", "q_proj"])),
    # beside gates of attention with a matrix of their own, which PEFT takes for parts of experts
    "afmoe_attention": ("afmoe", torch.float32, dict(r=4, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    # layers of one part, without the output of Mamba-2, which PEFT refuses there
    "nemotron_h_all": ("nemotron_h_dense", torch.float32, dict(r=3, lora_alpha=3, target_modules=[
        "in_proj", "q_proj", "o_proj", "up_proj", "down_proj"])),
    # short convolutions, whose projections are one matrix
    "lfm2_all": ("lfm2", torch.float32, dict(r=4, lora_alpha=4, target_modules="all-linear")),
    # a matrix for each of the projections
    "olmo_hybrid_all": ("olmo_hybrid", torch.float32, dict(r=2, lora_alpha=2, target_modules="all-linear")),
    # Mamba-2 beside attention, without its output, which PEFT refuses there
    "falcon_h1_all": ("falcon_h1", torch.float32, dict(r=3, lora_alpha=3, target_modules=[
        "in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
    # the text part alone of a model that also sees images and hears speech
    "phi4_multimodal_text": ("phi4_multimodal", torch.float32, dict(r=3, lora_alpha=3, target_modules=r"model\.layers\..*_proj")),
    # heads of v that are narrower than those of k
    "mimo_v2_attention": ("mimo_v2", torch.float32, dict(r=3, lora_alpha=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    # Kimi Delta Attention, without its products of low rank, around latent vectors
    "kimi_linear_attention": ("kimi_linear", torch.float32, dict(r=3, lora_alpha=3, target_modules=["k_proj", "v_proj", "b_proj", *LATENT])),
}
NUM_NUMBERED = 20  # The first cases have a number as seed. Later ones have a checksum of their name: their order has no effect.


@torch.no_grad()
def adapted(checkpoint, dtype, settings, folder, base, seed):
    """A model with a random adapter, which is saved in `folder`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            # Both matrices have values, which are exact in the dtype in which they are saved.
            parameter.copy_((0.15 * torch.randn(parameter.shape)).to(dtype).float())
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    weights = folder / "adapter_model.safetensors"
    save_file({key: tensor.to(dtype).contiguous() for key, tensor in load_file(weights).items()}, weights)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return model.eval()


@torch.no_grad()
def make(goldens, name, seed):
    base, dtype, settings = CASES[name]
    folder = goldens / "adapters" / name
    model = adapted(goldens / base, dtype, settings, folder, base, seed)
    prompts = [sequence["prompt"] for sequence in json.loads((goldens / base / "golden.json").read_text())["sequences"]]
    logits_of = lambda tokens: model(torch.tensor([tokens])).logits[0, -1]
    sequences = [golden(logits_of, prompt) for prompt in prompts]
    (folder / "golden.json").write_text(json.dumps({"base": base, "sequences": sequences}) + "\n")
    margins = sorted(m for sequence in sequences for m in sequence["margins"])
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir()) / 1024:.0f} KiB, margins {margins[0]:.4f} ..")


@torch.no_grad()
def make_demo(root, goldens):
    base = root / "model_repository" / "tensorrt_llm" / "1"
    settings = dict(r=2, lora_alpha=1, target_modules=["q_proj", "v_proj"])
    model = adapted(base, torch.bfloat16, settings, goldens / "adapters" / "demo", "demo", 313)
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = tokenizer("Once upon a time").input_ids
    sequence = golden(lambda tokens: model(torch.tensor([tokens])).logits[0, -1], prompt)
    # Up to the first token that another order of sums might change.
    num_kept = next((n for n, margin in enumerate(sequence["margins"]) if margin < 0.01), len(sequence["tokens"]))
    assert num_kept >= 8, f"only {num_kept} tokens; choose another seed"
    tokens = sequence["tokens"][:num_kept]
    kept = {"text": "Once upon a time", "prompt": prompt, "tokens": tokens,
            "answer": tokenizer.decode(prompt + tokens, skip_special_tokens=True)[len("Once upon a time"):]}
    (goldens / "adapters" / "demo" / "golden.json").write_text(json.dumps(kept) + "\n")
    print(f"demo: {num_kept} tokens: {kept['answer']!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parents[2]
    parser.add_argument("goldens", nargs="?", type=pathlib.Path, default=root / "tests" / "goldens")
    parser.add_argument("--only", nargs="+", choices=CASES, help="make only these cases")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for number, name in enumerate(CASES):
        if not arguments.only or name in arguments.only:
            make(arguments.goldens, name, 300 + number if number < NUM_NUMBERED else zlib.crc32(name.encode()))
    if not arguments.only:
        make_demo(root, arguments.goldens)


if __name__ == "__main__":
    main()
