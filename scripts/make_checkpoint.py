#!/usr/bin/env python3
r"""Writes a checkpoint with layers of real sizes and random bf16 weights, for tests on a GPU. One file: a list of shapes.

    make_checkpoint.py SHAPE OUT_DIR [--layers N] [--seed N] [--vocab N] [--quantize fp8|fp8-blocks|int8|awq|gptq|gptq-act-order|gptq8|mxfp4|nvfp4]
    make_checkpoint.py gqa|gemma3|phi4|qwen3moe|qwen35|qwen35moe|nemotronh|nemotron3nano|llama12b|llama14b|llama32b OUT_DIR --full \
                       [--quantize fp8-blocks]
    SHAPE: small, mha (Llama 2 7B's layer), gqa (Llama 3 8B's layer), mistral (a window), qwen2, qwen3 (norms of heads), gpt2,
           baichuan (ALiBi), internlm (biases), internlm2 (q, k and v of a group together), and the layers of other families:
           gemma2, gemma3, phi4, phi4mini, granite, olmo2, cohere2, smollm3, glm4, stablelm, gpt_neox, falcon, starcoder2, nemotron,
           exaone4, ministral3, apertus, commandr (Command R+), hunyuan (Hunyuan 7B's), gemma4 (31B's heads), gemma4e (E4B's heads, an
           embedding for each layer);
           qwen35 (Qwen3.5 27B's layers, three of four with a recurrent state), qwen35moe (35B A3B's, with fewer experts), qwen3next,
           each with a random MTP head; lfm2 (1.2B's layers) and lfm2moe (8B A1B's), with short convolutions, and with Mamba-2
           granitehybrid (Granite 4 H Tiny's layers), bamba (9B's), nemotronh (Nemotron Nano 9B v2's), nemotron3nano (30B A3B's) and
           nemotron3super (120B A12B's), the last two with fewer experts;
           with experts qwen3moe (Qwen3 30B A3B's layer), mixtral, qwen2moe, olmoe, granitemoe, gptoss (gpt-oss 20B's layer), and with
           the heads of these and fewer or narrower experts glm4moe, dots1, exaonemoe, minimaxm2, ernie45moe, llama4, gemma4moe, phimoe, afmoe (Trinity),
           hyv3 (Hunyuan 3), solaropen, cohere2moe (Command A+); graniteswa (windows and sinks), granitemicro (Granite 4 Micro);
           with latent vectors deepseekv2lite, glm4moelite (GLM-4.7-Flash), youtu, and with the heads of these and narrower layers
           deepseekv2, deepseekv3, mistral4

With --quantize the linear layers of decoder layers are rounded to a form of published checkpoints: fp8 with a scale for each row or for
blocks of 128 x 128, 8 bits with a scale for each row, 4 bits in groups of 128 (gptq-act-order: of columns that are no neighbours), 8 bits in such groups (gptq8), MXFP4 (of gptoss the experts alone) or NVFP4. `reference` in OUT_DIR has the same values in fp32, which check_gpu_model.py loads.

With --full the checkpoint has the layers and the vocabulary of Llama 3 8B, Gemma 3 12B, Phi-4, Qwen3 30B A3B, Qwen3.6 27B, Qwen3.6 35B A3B,
Nemotron Nano 9B v2, the first 13 layers of Nemotron 3 Nano, or of a Llama with matrices as large as those of Gemma 3 12B, Phi-4 or Qwen2.5 32B. For timing: the same random values are repeated, and written as fast as
the disk takes them; there is no `reference`.

Needs torch and transformers.
"""
import argparse
import concurrent.futures
import copy
import itertools
import json
import math
import pathlib
import sys
import tempfile

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "goldens"))
from published import as_published, internlm2

SHAPES = {  # hidden, inner, heads, KV heads, vocabulary, rope theta
    "small": (256, 704, 8, 4, 32000, 1e4),
    "mha": (4096, 11008, 32, 32, 32000, 1e4),
    "gqa": (4096, 14336, 32, 8, 128256, 5e5),
    "qwen2": (896, 4864, 14, 2, 151936, 1e6),
    "qwen3": (1024, 3072, 16, 8, 151936, 1e6),
    "gpt2": (768, 3072, 12, 12, 50257, None),
    "baichuan": (1536, 4096, 12, 12, 125696, 1e4),
    "mistral": (1024, 3584, 16, 4, 32000, 1e4),
    "internlm": (1024, 2752, 8, 8, 103168, 1e4),
    "internlm2": (1024, 3584, 8, 2, 92544, 1e6),
    "llama12b": (3840, 15360, 32, 16, 262208, 1e6),
    "llama14b": (5120, 17920, 40, 10, 100352, 1e6),
    "llama32b": (5120, 27648, 40, 8, 152064, 1e6),
}
MIXED = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4 = dict(head_dim=256, global_head_dim=512, layer_types=MIXED, sliding_window=64, tie_word_embeddings=True)
RECURRENT = dict(head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, num_experts_per_tok=8, moe_intermediate_size=512,
                 shared_expert_intermediate_size=512)
# Without kernels of its own for Mamba-2, transformers takes memory in the square of a chunk's size. It raises steps of Nemotron-H that are
# below `time_step_min`.
CHUNKS = dict(mamba_chunk_size=64)
NEMOTRON_H = CHUNKS | dict(head_dim=128, ssm_state_size=128, n_groups=8, time_step_min=1e-9)
DEEPSEEK = dict(n_routed_experts=64, num_experts_per_tok=8, moe_intermediate_size=704, n_shared_experts=1, first_k_dense_replace=1,
                norm_topk_prob=True)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=16.0, original_max_position_embeddings=256, beta_fast=32.0, beta_slow=1.0)


def latent(mscale, **own):
    """Fields of DeepSeek's layers with latent vectors."""
    yarn = YARN | dict(mscale=mscale, mscale_all_dim=mscale)
    return dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64,
                first_k_dense_replace=1, rope_parameters=yarn) | own


FAMILIES = {  # class, hidden, inner, heads, KV heads, and own fields
    "gemma2": ("Gemma2", 3584, 14336, 16, 8, dict(head_dim=256, layer_types=MIXED, sliding_window=64, query_pre_attn_scalar=256,
                                                  attn_logit_softcapping=2.0, final_logit_softcapping=3.0, tie_word_embeddings=True)),
    "gemma3": ("Gemma3", 3840, 15360, 16, 8, dict(head_dim=256, layer_types=MIXED, sliding_window=64, query_pre_attn_scalar=256,
                                                  tie_word_embeddings=True)),
    "phi4": ("Phi3", 5120, 17920, 40, 10, dict(pad_token_id=0)),
    "phi4mini": ("Phi3", 3072, 8192, 24, 8, dict(pad_token_id=0, rope_parameters=ROPE | {"partial_rotary_factor": 0.75})),
    "granite": ("Granite", 4096, 12800, 32, 8, dict(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=0.5,
                                                    attention_multiplier=0.0078125, tie_word_embeddings=True)),
    "olmo2": ("Olmo2", 4096, 11008, 32, 32, dict(pad_token_id=0, eos_token_id=2)),
    "cohere2": ("Cohere2", 4096, 14336, 32, 8, dict(layer_types=MIXED, sliding_window=64, logit_scale=0.25, eos_token_id=2)),
    "smollm3": ("SmolLM3", 2048, 11008, 16, 4, dict(pad_token_id=0, eos_token_id=2)),
    "glm4": ("Glm4", 4096, 13696, 32, 2, dict(head_dim=128, attention_bias=True, pad_token_id=0, eos_token_id=2)),
    "stablelm": ("StableLm", 2048, 5632, 32, 32, dict(use_qkv_bias=True)),
    "gpt_neox": ("GPTNeoX", 4096, 16384, 32, None, dict()),
    "falcon": ("Falcon", 4544, None, 71, None, dict()),
    "starcoder2": ("Starcoder2", 3072, 12288, 24, 2, dict(sliding_window=64, eos_token_id=2, bos_token_id=1)),
    "nemotron": ("Nemotron", 3072, 9216, 24, 8, dict(head_dim=128, bos_token_id=1, eos_token_id=2)),
    "qwen3moe": ("Qwen3Moe", 2048, 6144, 32, 4, dict(head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                                                     norm_topk_prob=True, vocab_size=151936)),
    "mixtral": ("Mixtral", 2048, 7168, 16, 4, dict(num_local_experts=8, num_experts_per_tok=2)),
    "qwen2moe": ("Qwen2Moe", 2048, 5632, 16, 16, dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
                                                      shared_expert_intermediate_size=5632)),
    "olmoe": ("Olmoe", 2048, 1024, 16, 16, dict(num_experts=64, num_experts_per_tok=8, pad_token_id=0, eos_token_id=2)),
    "granitemoe": ("GraniteMoe", 1536, 512, 24, 8, dict(num_local_experts=40, num_experts_per_tok=8, embedding_multiplier=12.0,
                                                        residual_multiplier=0.22, logits_scaling=0.5,
                                                        attention_multiplier=0.015625, tie_word_embeddings=True)),
    "gptoss": ("GptOss", 2880, 2880, 64, 8, dict(head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=64)),
    "qwen35": ("Qwen3_5", 5120, 17408, 24, 4, dict(head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48)),
    "qwen35moe": ("Qwen3_5Moe", 2048, None, 16, 2, RECURRENT | dict(num_experts=64)),
    "qwen3next": ("Qwen3Next", 2048, 5120, 16, 2, RECURRENT | dict(num_experts=64, norm_topk_prob=True)),
    "lfm2": ("Lfm2", 2048, 12288, 32, 8, dict(layer_types=["conv", "full_attention"] * 2)),
    "lfm2moe": ("Lfm2Moe", 2048, 7168, 32, 8, dict(layer_types=["conv", "full_attention"] * 2, moe_intermediate_size=1792)),
    "granitehybrid": ("GraniteMoeHybrid", 1536, 512, 12, 4, CHUNKS | dict(
        layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=64, num_experts_per_tok=6,
        shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_state=128, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=0.5, attention_multiplier=0.0078125, position_embedding_type="nope", tie_word_embeddings=True)),
    "bamba": ("Bamba", 4096, 14336, 32, 8, CHUNKS | dict(num_hidden_layers=2, attn_layer_indices=[1], mamba_d_state=128)),
    "nemotronh": ("NemotronH", 4480, 15680, 40, 8, NEMOTRON_H | dict(
        mamba_num_heads=128, mamba_head_dim=80, layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention", "mlp"])),
    # With the published factor of 2.5, rounding would change much by the choice of experts, which are large without gates.
    "nemotron3nano": ("NemotronH", 2688, 1856, 32, 2, NEMOTRON_H | dict(
        mamba_num_heads=64, mamba_head_dim=64, layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        n_routed_experts=32, num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=0.5)),
    "nemotron3super": ("NemotronH", 4096, 2688, 32, 2, NEMOTRON_H | dict(
        mamba_num_heads=128, mamba_head_dim=64, layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        n_routed_experts=64, num_experts_per_tok=22, moe_latent_size=1024, moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376, routed_scaling_factor=0.5)),
    "exaone4": ("Exaone4", 2048, 4096, 32, 8, dict(head_dim=64, layer_types=MIXED, sliding_window=64)),
    "ministral3": ("Ministral3", 3072, 9216, 32, 8, dict(head_dim=128, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1))),
    "apertus": ("Apertus", 4096, 21504, 32, 8, dict(head_dim=128, rope_parameters=ROPE, pad_token_id=0, eos_token_id=2)),
    "commandr": ("Cohere", 4096, 11264, 32, 4, dict(use_qk_norm=True, logit_scale=0.25, eos_token_id=2)),
    "hunyuan": ("HunYuanDenseV1", 4096, 14336, 32, 8, dict(head_dim=128, tie_word_embeddings=True, rope_parameters=dict(
        rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0))),
    "gemma4": ("Gemma4", 3840, 15360, 16, 8, GEMMA4 | dict(num_global_key_value_heads=4, attention_k_eq_v=True,
                                                          hidden_size_per_layer_input=0, final_logit_softcapping=3.0)),
    "gemma4e": ("Gemma4", 2560, 10240, 8, 2, GEMMA4 | dict(layer_types=MIXED + MIXED[:2], num_kv_shared_layers=2,
                                                          hidden_size_per_layer_input=256, vocab_size_per_layer_input=32000)),
    "gemma4moe": ("Gemma4", 2816, 2112, 16, 8, GEMMA4 | dict(enable_moe_block=True, num_experts=32, top_k_experts=8,
                                                            moe_intermediate_size=704, hidden_size_per_layer_input=0)),
    "glm4moe": ("Glm4Moe", 2048, 5504, 32, 4, DEEPSEEK | dict(head_dim=128, attention_bias=True, use_qk_norm=True,
                                                             rope_parameters=ROPE | {"partial_rotary_factor": 0.5})),
    "deepseekv2lite": ("DeepseekV2", 2048, 10944, 16, 16, latent(
        0.707, q_lora_rank=None, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, norm_topk_prob=False)),
    "deepseekv2": ("DeepseekV2", 2048, 5504, 128, 128, latent(
        0.707, q_lora_rank=1536, num_experts_per_tok=6, moe_intermediate_size=704, n_shared_experts=2, norm_topk_prob=False,
        topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=4.0)),
    "deepseekv3": ("DeepseekV3", 2048, 5504, 128, 128, latent(
        1.0, q_lora_rank=1536, num_experts_per_tok=8, moe_intermediate_size=704, n_shared_experts=1, norm_topk_prob=True, n_group=8,
        topk_group=4, routed_scaling_factor=2.5)),
    "mistral4": ("Mistral4", 2048, 5504, 32, 32, latent(
        1.0, kv_lora_rank=256, q_lora_rank=1024, qk_nope_head_dim=64, num_experts_per_tok=4, moe_intermediate_size=704, n_shared_experts=1,
        rope_parameters=YARN | dict(original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
                                    partial_rotary_factor=0.5))),
    "phimoe": ("Phimoe", 2048, 3200, 16, 4, dict(num_local_experts=16, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True,
                                                 rope_parameters=ROPE)),
    "dots1": ("Dots1", 2048, 5504, 16, 16, DEEPSEEK | dict(n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    "exaonemoe": ("ExaoneMoe", 2048, 5632, 32, 4, dict(
        head_dim=128, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=704, num_shared_experts=1, sliding_window=64,
        layer_types=MIXED, mlp_layer_types=["dense"] + 3 * ["sparse"])),
    "minimaxm2": ("MiniMaxM2", 2048, 768, 48, 8, dict(head_dim=128, num_local_experts=32, num_experts_per_tok=8,
                                                      bos_token_id=1, eos_token_id=2, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})),
    "ernie45moe": ("Ernie4_5_Moe", 2560, 6144, 20, 4, dict(moe_num_experts=32, moe_k=6, moe_intermediate_size=768,
                                                           moe_num_shared_experts=2, moe_layer_start_index=1)),
    "glm4moelite": ("Glm4MoeLite", 2048, 10240, 20, 20, dict(
        kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=64,
        num_experts_per_tok=4, moe_intermediate_size=1536, n_shared_experts=1, routed_scaling_factor=1.8, rope_parameters=ROPE,
        mlp_layer_types=["dense"] + 3 * ["sparse"])),
    "youtu": ("Youtu", 2048, 6144, 16, 16, dict(kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128,
                                               v_head_dim=128, tie_word_embeddings=True, rope_parameters=ROPE)),
    "afmoe": ("Afmoe", 2048, 6144, 32, 4, dict(
        head_dim=128, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=1024, num_shared_experts=1, num_dense_layers=1,
        route_scale=2.5, mup_enabled=True, sliding_window=64, layer_types=MIXED, rope_parameters=ROPE)),
    "hyv3": ("HYV3", 2048, 6144, 32, 4, dict(
        head_dim=128, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=768, num_shared_experts=1, rope_parameters=ROPE,
        mlp_layer_types=["dense"] + 3 * ["sparse"])),
    "solaropen": ("SolarOpen", 2048, None, 32, 4, dict(
        head_dim=128, n_routed_experts=32, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1280, n_group=1, topk_group=1,
        routed_scaling_factor=2.5, rope_parameters=ROPE)),
    "graniteswa": ("GraniteSWA", 2560, 8192, 20, 4, dict(
        num_hidden_layers=4, sliding_window=64, layer_types=MIXED, layer_rope_theta=[10000.0, 0, 500.0, 1e6], rope_parameters=ROPE,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=0.5, attention_multiplier=0.0078125, tie_word_embeddings=True)),
    "granitemicro": ("GraniteMoeHybrid", 2560, 8192, 40, 8, dict(
        layer_types=4 * ["full_attention"], num_local_experts=0, shared_intermediate_size=8192, position_embedding_type="rope",
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=0.5, attention_multiplier=0.015625, tie_word_embeddings=True)),
    "cohere2moe": ("Cohere2Moe", 4096, 1024, 32, 8, dict(
        head_dim=128, num_experts=16, num_experts_per_tok=4, num_shared_experts=1, expert_selection_fn="sigmoid", logit_scale=0.25,
        sliding_window=64, layer_types=MIXED, mlp_layer_types=["dense"] + 3 * ["sparse"], prefix_dense_intermediate_size=8192,
        tie_word_embeddings=True)),
    "llama4": ("Llama4", 2560, 4096, 40, 8, dict(intermediate_size_mlp=8192, head_dim=128, num_local_experts=16, moe_layers=[0, 1, 3],
                                                 no_rope_layers=[1, 1, 1, 0], attention_chunk_size=64, floor_scale=32, attn_scale=0.1,
                                                 pad_token_id=0)),
}
QUANTIZED_ENDS = ("_proj.weight", "_proj_qkv.weight", "_proj_z.weight", "kv_a_proj_with_mqa.weight")
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "group_size": 128, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
OWN_FIELDS = {"qwen3": {"head_dim": 128}, "mistral": {"sliding_window": 128}, "internlm": {"attention_bias": True},
              "llama12b": {"head_dim": 128}}


def blocks(pattern):
    """The kinds of Nemotron-H's layers, from their letters."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [kinds[letter] for letter in pattern]


FULL = {  # layers, and fields of the whole model
    "gemma3": (48, dict(vocab_size=262208, layer_types=(5 * ["sliding_attention"] + ["full_attention"]) * 8, sliding_window=1024)),
    "phi4": (40, dict(vocab_size=100352)),
    "qwen3moe": (48, {}),
    "qwen35": (64, dict(vocab_size=248320)),
    "qwen35moe": (40, dict(vocab_size=248320, num_experts=256)),
    "nemotronh": (56, dict(vocab_size=131072, layers_block_type=blocks("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"))),
    "nemotron3nano": (13, dict(vocab_size=131072, n_routed_experts=128, layers_block_type=blocks("MEMEM*EMEMEM*"))),
    "gqa": (32, {}),
    "llama12b": (48, {}),
    "llama14b": (40, {}),
    "llama32b": (64, {}),
}


def family(shape, layers, whole):
    """A model of one of FAMILIES, with the fields of `whole`."""
    name, hidden, inner, heads, kv_heads, own = FAMILIES[shape]
    own = own | whole
    text = "Text" if name in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
    sizes = dict(hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads)
    fields = {key: value for key, value in sizes.items() if value is not None} | own
    layers = own.get("num_hidden_layers", len(own.get("layer_types", layers * [None])))
    fields |= dict(vocab_size=own.get("vocab_size", 32000), num_hidden_layers=layers, max_position_embeddings=4096)
    config = getattr(transformers, f"{name}{text}Config")(**fields)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def mtp_layer(model):
    """A model of the one layer of the head that guesses drafts; none if the family has no head that transformers' layers can make."""
    if type(model).__name__ not in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"):
        return None
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    return type(model)(config)


def mtp_name(name):
    """The name in the head of a tensor of its model of one layer; none for others."""
    name = name.removeprefix("model.")
    return f"mtp.{name}" if name.startswith(("layers.", "norm.")) else None


def mtp_inputs(config):
    """Names and shapes of what joins the inputs of the head."""
    width = config.hidden_size
    return {"mtp.fc.weight": [width, 2 * width], "mtp.pre_fc_norm_embedding.weight": [width], "mtp.pre_fc_norm_hidden.weight": [width]}


def add_mtp(folder, model):
    """Adds the head to a checkpoint. Its matrices are so large that it changes its inputs as much as it passes them on."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        layer = mtp_layer(model)
    if layer is None:
        return
    randomize_biases_and_norms(layer)
    with tempfile.TemporaryDirectory() as made:
        layer.save_pretrained(made, max_shard_size="100GB")
        own = {mtp_name(name): tensor for name, tensor in load_file(pathlib.Path(made) / "model.safetensors").items()}
    tensors = load_file(folder / "model.safetensors") | {name: tensor for name, tensor in own.items() if name}
    for name, shape in mtp_inputs(model.config).items():
        spread = 0.2 if "norm" in name else 0.7 * model.config.hidden_size ** -0.5
        tensors[name] = (spread * torch.randn(shape, device="cpu")).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config_and_model(shape, layers, whole={}):
    if shape in FAMILIES:
        return family(shape, layers, whole)
    hidden, inner, heads, kv_heads, vocab, theta = SHAPES[shape]
    if shape == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=hidden, n_inner=inner, n_head=heads, n_layer=layers, vocab_size=vocab))
    classes = {"mistral": (MistralConfig, MistralForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
               "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config, model = classes.get(shape, (LlamaConfig, LlamaForCausalLM))
    return model(config(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        vocab_size=vocab, rope_theta=theta, num_hidden_layers=layers, max_position_embeddings=4096, tie_word_embeddings=False,
        **OWN_FIELDS.get(shape, {})))


@torch.no_grad()
def randomize_biases_and_norms(model):
    """Adds noise to biases, norms and factors. With their initial zeros and ones, tests would not notice if one were ignored."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("conv1d.weight", "conv.conv.weight")):  # is so small at first that the norms behind it see only their epsilon
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif name.endswith(("mamba.A_log", "mamba.dt_bias", "mixer.A_log", "mixer.dt_bias")):  # forgets all but a few positions at first
            parameter.copy_(torch.randn_like(parameter) - 1)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):  # beside the weights of experts, which differ little
            parameter.add_(0.05 * torch.randn_like(parameter))
        elif name.endswith("layer_scalar") or isinstance(parameter, torch.nn.Parameter) and (
                "norm" in name or ".ln_" in name or name.endswith(("bias", ".D", "sinks", "router.scale", "per_expert_scale"))):
            parameter.add_(0.2 * torch.randn_like(parameter))


def publish_as_baichuan(folder):
    """Rewrites the checkpoint with Baichuan 13B's names of weights and settings."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[prefix + "W_pack.weight"] = torch.cat([tensors.pop(f"{prefix}{part}_proj.weight") for part in "qkv"])
    config |= {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "z_loss_weight": 0,
               "model_max_length": config.pop("max_position_embeddings")}
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "rope_scaling", "attention_bias", "mlp_bias"):
        config.pop(key, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def publish_as_internlm(folder, shape, config):
    """Writes the same weights in InternLM's format. The checkpoint for transformers stays in `reference`."""
    reference = folder / "reference"
    tensors = load_file(reference / "model.safetensors")
    if shape == "internlm2":
        fields = as_published(config, "InternLM2ForCausalLM", "internlm2", bias=False, rope_theta=SHAPES[shape][-1])
        tensors = internlm2(config, tensors)
    else:
        fields = as_published(config, "InternLMForCausalLM", "internlm", bias=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def in_fp8(weight, block):
    """Codes and scales of blocks of [rows, columns], and their values. The last blocks may be smaller."""
    rows, cols = weight.shape
    height, width = block[0], block[1] or cols
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    values = codes.float() * scale
    whole = lambda blocks: blocks.flatten(2, 3).flatten(0, 1)[:rows, :cols].contiguous()
    return whole(codes), scale[:, 0, :, 0].float().contiguous(), whole(values)


def in_int8(weight):
    """Integers of 8 bits [rows, cols], scales [rows, 1] and the values."""
    scale = (weight.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6).bfloat16()
    codes = (weight.float() / scale.float()).round().clamp(-127, 127)
    return codes.to(torch.int8), scale, codes * scale.float()


def in_groups(weight, bits, group=128):
    """Codes [rows, cols], scales and zero points [rows, groups] and the values."""
    rows, cols = weight.shape
    groups = weight.float().reshape(rows, cols // group, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = 2**bits - 1
    scale = ((high - low) / largest).clamp(min=1e-6).half().float()
    zero = (-low / scale).round().clamp(1, largest)  # GPTQ cannot store 0
    codes = ((groups / scale).round() + zero).clamp(0, largest)
    values = ((codes - zero) * scale).reshape(rows, cols)
    return codes.reshape(rows, cols).int(), scale[..., 0], zero[..., 0].int(), values


def in_e2m1(groups, scale):
    """Codes of groups of columns that have a scale, two in a byte, and the values."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=groups.device)
    code = torch.bucketize(groups.abs() / scale, (sizes[1:] + sizes[:-1]) / 2)
    values = sizes[code] * scale * groups.sign()
    code = (code + 8 * (groups < 0)).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, values.flatten(-2)


def in_mxfp4(weight):
    """Codes of e2m1, two in a byte, and exponents of groups of 32 columns, and the values."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 2).clamp(-127, 127)
    codes, values = in_e2m1(groups, 2**exponent)
    return codes, (exponent[..., 0] + 127).to(torch.uint8), values


def in_nvfp4(weight):
    """Codes of e2m1, two in a byte, scales in e4m3 of groups of 16 columns, the number by which all are divided, and the values."""
    groups = weight.float().unflatten(-1, (-1, 16))
    divisor = 448 * 6 / groups.abs().amax()
    scale = (groups.abs().amax(-1, keepdim=True) / 6 * divisor).clamp(min=2.0**-9, max=448).to(torch.float8_e4m3fn)
    codes, values = in_e2m1(groups, scale.float() * (1 / divisor))
    return codes, scale[..., 0].contiguous(), divisor.reshape(1), values


def experts_in_mxfp4(tensors, values):
    """Rewrites the experts of gpt-oss, which transformers keeps as [experts, inputs, outputs]."""
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts = [in_mxfp4(expert.T.to("cuda" if torch.cuda.is_available() else "cpu")) for expert in tensors.pop(name)]
        blocks, scales, rounded = (torch.stack([expert[i] for expert in experts]).cpu() for i in range(3))
        tensors |= {name + "_blocks": blocks.contiguous(), name + "_scales": scales.contiguous()}
        values[name] = rounded.transpose(1, 2).contiguous()


def packed(values, order=range(8)):
    """As many neighbouring columns in a word as `order` has; order[i] is the one in part i."""
    columns = values.reshape(values.shape[0], -1, len(order)).long()
    word = sum(columns[..., column] << (32 // len(order) * part) for part, column in enumerate(order))
    return torch.where(word >= 2**31, word - 2**32, word).int().contiguous()


def in_floats_of_4_bits(form, strategy, group):
    """The configuration of compressed-tensors."""
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True, "dynamic": False}
    return {"quant_method": "compressed-tensors", "format": f"{form}-pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


def quantize(folder, form):
    """Rewrites the checkpoint in a quantized form, and its values in fp32 to `reference`."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    values = {name: tensor.float() for name, tensor in tensors.items()}
    is_gpt_oss = form == "mxfp4" and config["model_type"] == "gpt_oss"
    if is_gpt_oss:
        experts_in_mxfp4(tensors, values)
    for name in [name for name in tensors if name.endswith(QUANTIZED_ENDS) and not is_gpt_oss]:
        weight, layer = tensors.pop(name).to("cuda" if torch.cuda.is_available() else "cpu"), name.removesuffix("weight")
        if form in ("fp8", "fp8-blocks"):
            codes, scales, values[name] = in_fp8(weight, (1, None) if form == "fp8" else (128, 128))
            own = {"weight": codes, "weight_scale" if form == "fp8" else "weight_scale_inv": scales}
        elif form == "int8":
            codes, scales, values[name] = in_int8(weight)
            own = {"weight": codes, "weight_scale": scales}
        elif form == "mxfp4":
            codes, scales, values[name] = in_mxfp4(weight)
            own = {"weight_packed": codes.flatten(1), "weight_scale": scales}
        elif form == "nvfp4":
            codes, scales, divisor, values[name] = in_nvfp4(weight)
            own = {"weight_packed": codes.flatten(1), "weight_scale": scales, "weight_global_scale": divisor}
        else:
            bits = 8 if form == "gptq8" else 4
            cols = torch.arange(weight.shape[1], device=weight.device)
            if form == "gptq-act-order":  # matrices with the same inputs have the same order
                cols = torch.randperm(len(cols), generator=torch.Generator("cpu").manual_seed(len(cols)), device="cpu").to(weight.device)
            codes, scales, zeros, rounded = in_groups(weight[:, cols], bits)
            codes, values[name] = codes[:, cols.argsort()], rounded[:, cols.argsort()].contiguous()
            order = (0, 2, 4, 6, 1, 3, 5, 7) if form == "awq" else range(32 // bits)
            along_inputs = packed(codes.T, order) if form == "awq" else packed(codes, order).T
            stored_zeros = zeros.T - int(form != "awq")
            own = {"qweight": along_inputs.contiguous(), "qzeros": packed(stored_zeros, order), "scales": scales.T.half().contiguous()}
            if form == "gptq-act-order":
                own["g_idx"] = (cols.argsort() // 128).int()
        tensors |= {layer + end: tensor.cpu() for end, tensor in own.items()}
        values[name] = values[name].cpu()
    config["quantization_config"] = {
        "fp8": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}}},
            "ignore": ["lm_head"]},
        "fp8-blocks": FP8_BLOCKS,
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
                 if is_gpt_oss else in_floats_of_4_bits("mxfp4", "group", 32),
        "nvfp4": in_floats_of_4_bits("nvfp4", "tensor_group", 16),
        "gptq": GPTQ | {"bits": 4},
        "gptq-act-order": GPTQ | {"bits": 4, "desc_act": True},
        "gptq8": GPTQ | {"bits": 8},
        "int8": {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}}},
            "ignore": ["lm_head"]},
    }[form]
    reference = folder / "reference"
    reference.mkdir(exist_ok=True)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    (reference / "config.json").write_text(json.dumps(plain | {"dtype": "float32"}, indent=2) + "\n")
    save_file(values, reference / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def stored_shapes(model):
    """Names and shapes of the tensors that a checkpoint of the model has. Experts are stored one by one."""
    tied = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
    for name, tensor in model.state_dict().items():
        prefix, experts, part = name.rpartition("experts.")
        if experts and part in ("gate_up_proj", "up_proj", "down_proj"):
            count, rows, cols = tensor.shape
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for expert, own in itertools.product(range(count), parts):
                yield f"{prefix}experts.{expert}.{own}.weight", [rows // len(parts), cols]
        elif name not in tied:
            yield name, list(tensor.shape)


def stored_mtp_shapes(model):
    layer = mtp_layer(model)
    if layer is not None:
        yield from ((mtp_name(name), shape) for name, shape in stored_shapes(layer) if mtp_name(name))
        yield from mtp_inputs(model.config).items()


def stored_tensors(model, quantize):
    """Names, types and shapes of the tensors of a checkpoint, with linear layers of decoder layers in fp8 if `quantize` is set."""
    for name, shape in itertools.chain(stored_shapes(model), stored_mtp_shapes(model)):
        if quantize and name.endswith(QUANTIZED_ENDS):
            yield name, "F8_E4M3", shape
            yield name + "_scale_inv", "F32", [math.ceil(size / 128) for size in shape]
        else:
            yield name, "BF16", shape


def write_full(folder, model, quantize):
    """Writes files of about 2 GB at once, each with the same random values."""
    as_bytes = lambda tensor: memoryview(tensor.view(torch.uint8).numpy())
    random = torch.randn(1 << 25, device="cpu")
    pools = {"BF16": as_bytes((random * 0.02).bfloat16()), "F8_E4M3": as_bytes(random.to(torch.float8_e4m3fn)),
             "F32": as_bytes(torch.full((1 << 14,), 0.02, device="cpu"))}
    ones = as_bytes(torch.ones(1 << 14, device="cpu").bfloat16())
    widths = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
    files, sizes = [{}], [0]
    for name, dtype, shape in stored_tensors(model, quantize):
        if sizes[-1] > 2e9:
            files, sizes = [*files, {}], [*sizes, 0]
        size = widths[dtype] * math.prod(shape)
        files[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [sizes[-1], sizes[-1] + size]}
        sizes[-1] += size

    def write(number):
        header = json.dumps(files[number]).encode()
        header += b" " * (-len(header) % 8)  # as the format's own writer aligns the data
        with (folder / f"model-{number:03}.safetensors").open("wb", buffering=0) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name, tensor in files[number].items():
                first, last = tensor["data_offsets"]
                values = ones if "norm" in name else pools[tensor["dtype"]]
                for start in range(first, last, len(values)):
                    file.write(values[:min(len(values), last - start)])

    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    model.config.save_pretrained(folder)
    if quantize:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = FP8_BLOCKS
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        list(threads.map(write, range(len(files))))
    print(f"{folder}: {sum(sizes) / 1e9:.1f} GB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES, *FAMILIES])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quantize", choices=["fp8", "fp8-blocks", "int8", "awq", "gptq", "gptq-act-order", "gptq8", "mxfp4", "nvfp4"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, help="tokens of the shape `small`, in the place of 32000")
    parser.add_argument("--full", action="store_true", help="a whole model, for timing: " + ", ".join(FULL))
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    if arguments.vocab:
        if arguments.shape != "small":
            parser.error("--vocab is for the shape small")
        SHAPES["small"] = (*SHAPES["small"][:4], arguments.vocab, SHAPES["small"][5])
    if arguments.full:
        if arguments.shape not in FULL:
            parser.error(f"--full is for {', '.join(FULL)}")
        if arguments.quantize not in (None, "fp8-blocks"):
            parser.error("--full takes --quantize fp8-blocks alone")
        with torch.device("meta"):
            return write_full(arguments.out, config_and_model(arguments.shape, *FULL[arguments.shape]), arguments.quantize)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = config_and_model(arguments.shape, arguments.layers)
        if arguments.shape not in ("small", "mha", "gqa"):
            randomize_biases_and_norms(model)
    is_internlm = arguments.shape.startswith("internlm")
    model.save_pretrained(arguments.out / "reference" if is_internlm else arguments.out, max_shard_size="100GB")
    if not is_internlm:
        add_mtp(arguments.out, model)
    if arguments.shape == "baichuan":
        publish_as_baichuan(arguments.out)
    if is_internlm:
        publish_as_internlm(arguments.out, arguments.shape, model.config)
    if arguments.quantize:
        quantize(arguments.out, arguments.quantize)
    print(f"{arguments.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")


main()
