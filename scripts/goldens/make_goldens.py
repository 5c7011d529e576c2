#!/usr/bin/env python3
"""Makes tiny random checkpoints, with the outputs of transformers for them in fp32. One file: a list of cases.

    make_goldens.py [OUT_DIR]          default: tests/goldens beside this script's parent folder

Each case is a folder: config.json, weights, and golden.json with prompts, the logits of the prompt's last position, the
greedy continuation, and at each of its steps the margin between the two highest logits. For architectures that transformers does not
contain, the reference is its Llama with the same weights, which are saved with the publishers' names and layouts (`published.py`). For
ALiBi it is a short implementation in that file, which is first checked against transformers' Llama.
Weights are stored in one dtype; the reference computes in fp32 with exactly these values. Seeds are fixed, so the files are
reproducible.
Needs torch, transformers and safetensors.
"""
import argparse
import json
import pathlib
import tempfile
import zlib

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import published
import quantized

NUM_TOKENS = 32
NUM_NUMBERED = 105  # The first cases have their number as seed. Later ones have a checksum of their name: their order has no effect.
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")  # some layers have a recurrent state
FROM_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "nemotron", *HYBRID)  # store norms as differences from one
PROMPT_LENS = (1, 7, 40)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

CASES = {
    # GQA with scaled rotation; head_dim apart from hidden / heads; odd vocabulary
    "llama3_gqa": (torch.bfloat16, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=96, intermediate_size=176, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=501, rope_parameters=LLAMA3, tie_word_embeddings=False)),
    # head_dim 128, one KV head replicated over every worker, tied embeddings
    "tied_mqa": (torch.bfloat16, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        head_dim=128, vocab_size=515, rope_parameters=LINEAR, tie_word_embeddings=True)),
    # every head its own KV, biases everywhere, single precision
    "mha_bias_f32": (torch.float32, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=64, intermediate_size=136, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, vocab_size=333, rope_parameters=YARN, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False)),
    # half precision, head_dim 80
    "dim80_f16": (torch.float16, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=72, intermediate_size=152, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=80, vocab_size=400, rope_parameters=PLAIN, tie_word_embeddings=False)),
    # a window shorter than the sequences
    "mistral_window": (torch.bfloat16, MistralConfig, MistralForCausalLM, dict(
        hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=420, rope_parameters=PLAIN, sliding_window=21, tie_word_embeddings=False)),
    # biases of q, k and v alone; a window of all layers
    "qwen2": (torch.bfloat16, Qwen2Config, Qwen2ForCausalLM, dict(
        hidden_size=64, intermediate_size=152, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=410, rope_parameters=PLAIN, use_sliding_window=True, sliding_window=25, max_window_layers=0,
        tie_word_embeddings=True)),
    # norms of each head's q and k
    "qwen3": (torch.bfloat16, Qwen3Config, Qwen3ForCausalLM, dict(
        hidden_size=64, intermediate_size=152, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=410, rope_parameters=PLAIN, tie_word_embeddings=False)),
    # layer norms, learned positions, transposed weights, no gate; an inner width that four workers share unevenly
    "gpt2": (torch.bfloat16, GPT2Config, GPT2LMHeadModel, dict(
        n_embd=64, n_inner=200, n_layer=2, n_head=4, n_positions=128, vocab_size=389, tie_word_embeddings=True)),
    # a Llama with biases in attention
    "internlm": (torch.float16, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=64, intermediate_size=136, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=350, rope_parameters=PLAIN, attention_bias=True, tie_word_embeddings=False)),
    # q, k and v in one matrix, by KV heads
    "internlm2": (torch.bfloat16, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=16, vocab_size=420, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False)),
    # q, k and v in one matrix, one below the other; a head of unit rows
    "baichuan2_7b": (torch.bfloat16, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=64, intermediate_size=136, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=380, rope_parameters=PLAIN, tie_word_embeddings=False)),
    # the same with ALiBi; a number of heads that is no power of two
    "baichuan2_13b_f32": (torch.float32, LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=96, intermediate_size=136, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=12,
        vocab_size=380, rope_parameters=PLAIN, tie_word_embeddings=False)),
}


SMALL = dict(hidden_size=64, intermediate_size=104, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=200, tie_word_embeddings=False)
WIDE = dict(intermediate_size=128, head_dim=32, rope_parameters=PLAIN)
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FACTORS = lambda start, count: [round(start + 0.13 * i, 4) for i in range(count)]
FALCON = dict(head_dim=None, intermediate_size=None, num_key_value_heads=None)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Layers with a recurrent state around one with attention, whose heads have other sizes.
RECURRENT = dict(head_dim=32, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
                 linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24)
# Mamba-2: heads of 20 with states of 12, and chunks shorter than the prompts.
MAMBA = dict(mamba_n_heads=4, mamba_d_head=20, mamba_n_groups=2, mamba_d_state=12, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=16,
             hidden_size=40, num_hidden_layers=3)
GRANITE_HYBRID = dict(num_attention_heads=5, num_key_value_heads=5, intermediate_size=56, shared_intermediate_size=88,
                      layer_types=["linear_attention", "full_attention", "linear_attention"], embedding_multiplier=12.0,
                      residual_multiplier=0.22, attention_multiplier=0.0625, logits_scaling=8.0)
FALCON_H1 = MAMBA | dict(hidden_size=64, num_hidden_layers=2, embedding_multiplier=1.7, lm_head_multiplier=0.6, key_multiplier=0.8,
                         attention_in_multiplier=1.3, attention_out_multiplier=0.7, ssm_in_multiplier=1.2, ssm_out_multiplier=0.5,
                         ssm_multipliers=[0.9, 1.4, 0.7, 1.6, 0.8], mlp_multipliers=[1.3, 0.6])
NEMOTRON_H = dict(num_hidden_layers=None, head_dim=24, mamba_num_heads=8, mamba_head_dim=8, n_groups=4, ssm_state_size=12,
                  layer_norm_epsilon=1e-5)
PHI4_MULTIMODAL = dict(
    pad_token_id=0, sliding_window=25, original_max_position_embeddings=8, tie_word_embeddings=True, rope_parameters={
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": FACTORS(1.0, 6), "long_factor": FACTORS(2.0, 6),
        "partial_rotary_factor": 0.75},
    vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2,
                       crop_size=8),
    audio_config=dict(hidden_size=8, intermediate_size=8, num_blocks=1, num_attention_heads=2, ext_pw_out_channel=8,
                      depthwise_separable_out_channel=8, nemo_conv_channels=8, bias_max_distance=8, input_size=8))
SHORT_CONV = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
QWEN_EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=56, shared_expert_intermediate_size=88)
GRANITE_SWA = dict(num_hidden_layers=3, sliding_window=20, layer_types=MIXED, layer_rope_theta=[10000.0, 0, 500.0], rope_parameters=YARN,
                   embedding_multiplier=1.5, residual_multiplier=0.6, logits_scaling=2.0, attention_multiplier=0.3)
# Sections of positions of images, which texts do not have.
SECTIONS = PARTIAL | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}

# Heads of q and k have 24 elements and 16 that are rotated, those of v have 40.
LATENT = dict(num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=16,
              v_head_dim=40)
DEEPSEEK_EXPERTS = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=56, first_k_dense_replace=1)
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
                 "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

KIMI_LINEAR = LATENT | dict(num_hidden_layers=2, linear_head_dim=16, linear_num_heads=4, num_local_experts=4, num_experts_per_tok=2,
                            intermediate_size=64, moe_intermediate_size=32, n_group=2, topk_group=1, v_head_dim=16, vocab_size=176,
                            pad_token_id=0)
GPT_OSS = dict(head_dim=24, num_hidden_layers=3, intermediate_size=64, num_local_experts=6, num_experts_per_tok=2, sliding_window=20,
               swiglu_limit=1.0, rope_parameters=YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0})

# Families that differ from Llama by more than numbers. Half precision is exact in fp32 products, so little rounding hides an error.
FAMILIES = {
    # norms from one, scaled embeddings, the tanh GELU
    "gemma": ("Gemma", dict(head_dim=24, num_key_value_heads=1, tie_word_embeddings=True)),
    # norms on both sides, caps of scores and logits that matter, windows of some layers, a scale of its own
    "gemma2": ("Gemma2", dict(head_dim=16, num_hidden_layers=3, sliding_window=20, query_pre_attn_scalar=24,
                              attn_logit_softcapping=3.0, final_logit_softcapping=4.0, tie_word_embeddings=True)),
    # a rotation for layers with a window and one for the others
    "gemma3": ("Gemma3", dict(head_dim=16, num_hidden_layers=3, sliding_window=20, query_pre_attn_scalar=24,
                              layer_types=MIXED, rope_parameters={
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                                  "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}},
                              tie_word_embeddings=True)),
    # stacked q, k, v and gate, up; a part of each head rotated; a window
    "phi3": ("Phi3", dict(head_dim=None, sliding_window=25, rope_parameters=PARTIAL, pad_token_id=0)),
    # two lists of factors, of which the long one is used
    "phi3_longrope": ("Phi3", dict(head_dim=None, original_max_position_embeddings=8, pad_token_id=0, rope_parameters={
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": FACTORS(1.0, 6), "long_factor": FACTORS(2.0, 6),
        "partial_rotary_factor": 0.75})),
    # attention and feed-forward in parallel behind one norm; biases everywhere
    "phi": ("Phi", dict(head_dim=None, rope_parameters=PARTIAL)),
    # four multipliers
    "granite": ("Granite", dict(attention_bias=True, embedding_multiplier=12.0, residual_multiplier=0.22,
                                attention_multiplier=0.0625, logits_scaling=8.0)),
    # norms without weights
    "olmo": ("Olmo", dict()),
    # norms behind the branches alone; q and k normed over all heads
    "olmo2": ("Olmo2", dict(num_key_value_heads=4)),
    "olmo3": ("Olmo3", dict(num_hidden_layers=3, sliding_window=20, layer_types=MIXED)),
    # parallel, neighbouring pairs rotated, layer norms of each head, scaled logits
    "cohere": ("Cohere", dict(use_qk_norm=True, logit_scale=0.25, tie_word_embeddings=True)),
    # layers that are not rotated
    "cohere2": ("Cohere2", dict(logit_scale=0.5, num_hidden_layers=3, sliding_window=20, layer_types=MIXED, tie_word_embeddings=True)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1], tie_word_embeddings=True, pad_token_id=0)),
    "exaone4": ("Exaone4", dict(num_hidden_layers=3, sliding_window=20, layer_types=MIXED)),
    # half of each head rotated, in neighbouring pairs
    "glm": ("Glm", dict(head_dim=24, attention_bias=True, pad_token_id=0)),
    "glm4": ("Glm4", dict(head_dim=24, attention_bias=True, pad_token_id=0)),
    # layer norms with biases
    "stablelm": ("StableLm", dict(head_dim=None, use_qkv_bias=True)),
    "stablelm_parallel": ("StableLm", dict(head_dim=None, use_parallel_residual=True)),
    # q, k and v of each head together; two norms of one input
    "gpt_neox": ("GPTNeoX", dict(head_dim=None, num_key_value_heads=None, hidden_size=128)),
    "gpt_neox_serial": ("GPTNeoX", dict(head_dim=None, num_key_value_heads=None, hidden_size=128, use_parallel_residual=False)),
    # one KV head; several with two norms; one for each query head, in series
    "falcon_7b": ("Falcon", FALCON | dict(tie_word_embeddings=True)),
    "falcon_40b": ("Falcon", FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=104)),
    "falcon_serial": ("Falcon", FALCON | dict(multi_query=False, parallel_attn=False, bias=True)),
    # no gate, biases
    "starcoder2": ("Starcoder2", dict(head_dim=None, sliding_window=20)),
    # layer norms from one, the squared ReLU
    "nemotron": ("Nemotron", dict(head_dim=24)),
    "arcee": ("Arcee", dict()),
    "seed_oss": ("SeedOss", dict(head_dim=24, residual_dropout=0.0)),
    "helium": ("Helium", dict(head_dim=16)),
    "ernie4_5": ("Ernie4_5", dict(head_dim=24, use_bias=True, tie_word_embeddings=True)),
    "ministral": ("Ministral", dict(head_dim=16, num_hidden_layers=3, sliding_window=20, layer_types=MIXED)),
    # experts: probabilities divided by their sum; a shared expert behind a gate; norms of heads; dense layers between; stacked weights
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2Moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=56,
                                   shared_expert_intermediate_size=88)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=56, head_dim=24,
                                   num_hidden_layers=3, mlp_only_layers=[1], norm_topk_prob=True)),
    "olmoe": ("Olmoe", dict(num_experts=6, num_experts_per_tok=3, intermediate_size=56)),
    "granite_moe": ("GraniteMoe", dict(num_local_experts=5, num_experts_per_tok=2, intermediate_size=56,
                                       embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0625,
                                       logits_scaling=8.0)),
    # queries that are longer from every eighth position on
    "ministral3": ("Ministral3", dict(head_dim=16, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4})),
    # layers without a window that have larger heads, fewer KV heads and use k as v; factors of layers; capped logits
    "gemma4": ("Gemma4", dict(head_dim=16, num_hidden_layers=3, sliding_window=20, layer_types=MIXED[:1] + MIXED[:2],
                              global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
                              hidden_size_per_layer_input=0, final_logit_softcapping=4.0, tie_word_embeddings=True)),
    # an embedding for each layer; two layers that read the keys and values of others, with a wider feed-forward
    "gemma4_shared": ("Gemma4", dict(head_dim=16, num_hidden_layers=6, num_key_value_heads=1, sliding_window=20,
                                     intermediate_size=56, layer_types=MIXED + MIXED[1::-1] + MIXED[1:2], global_head_dim=24,
                                     num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=8,
                                     vocab_size_per_layer_input=216, tie_word_embeddings=True)),
    # an activation with learned numbers, norms of heads, no gate
    "apertus": ("Apertus", dict(head_dim=24, rope_parameters=LLAMA3)),
    # layers that see chunks; layers that are not rotated, whose queries are longer from every eighth position on; the weight of an
    # expert multiplies its input; a dense layer
    "llama4": ("Llama4", dict(head_dim=16, num_hidden_layers=3, no_rope_layers=[1, 0, 1], attention_chunk_size=11, floor_scale=8,
                              attn_scale=0.5, num_local_experts=6, moe_layers=[0, 1], intermediate_size=56,
                              intermediate_size_mlp=104, rope_parameters=LLAMA3)),
    # every layer but the first of four has a window
    "cwm": ("Cwm", dict(head_dim=16, num_hidden_layers=5, intermediate_size=56, sliding_window=20, rope_parameters=LLAMA3)),
    "vaultgemma": ("VaultGemma", dict(head_dim=16, num_hidden_layers=3, sliding_window=20, query_pre_attn_scalar=24,
                                      attn_logit_softcapping=3.0, final_logit_softcapping=4.0, tie_word_embeddings=True)),
    # four multipliers, with norms behind each part and without
    "hyperclovax": ("HyperCLOVAX", dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0625,
                                        logits_scaling=0.125)),
    "hyperclovax_granite": ("HyperCLOVAX", dict(use_post_norm=False, residual_multiplier=0.22, logits_scaling=0.125)),
    # layer norms and biases, no gate
    "jais2": ("Jais2", dict()),
    # norms without weights, one behind the embedding; heads rotated backwards; capped logits
    "nanochat": ("NanoChat", dict(head_dim=None, final_logit_softcapping=20.0)),
    # learned positions from the third row of their table on
    "opt": ("OPT", dict(head_dim=None, num_key_value_heads=None, intermediate_size=None, ffn_dim=104, tie_word_embeddings=True)),
    # ALiBi, a norm of the embeddings, q, k and v of each head together
    "bloom": ("Bloom", FALCON | dict(tie_word_embeddings=True)),
    # a part of each head rotated in neighbouring pairs; a head with a bias
    "gptj": ("GPTJ", FALCON | dict(n_inner=104, rotary_dim=8)),
    # one KV head, or q, k and v of each head together
    "gpt_bigcode": ("GPTBigCode", FALCON | dict(n_inner=104, tie_word_embeddings=True)),
    "gpt_bigcode_mha": ("GPTBigCode", FALCON | dict(n_inner=104, multi_query=False, tie_word_embeddings=True)),
    # experts beside the feed-forward, with inputs and norms of their own and a factor of each
    "gemma4_moe": ("Gemma4", dict(head_dim=16, sliding_window=20, layer_types=MIXED[:2], global_head_dim=32, enable_moe_block=True,
                                  num_experts=6, top_k_experts=2, moe_intermediate_size=56, hidden_size_per_layer_input=0,
                                  tie_word_embeddings=True)),
    # an expert that all tokens share, in one matrix; norms behind each part; experts and rotations of some layers
    "granite_moe_shared": ("GraniteMoeShared", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=56,
                                                    shared_intermediate_size=88, residual_multiplier=0.22, logits_scaling=8.0,
                                                    attention_multiplier=0.0625)),
    "flex_olmo": ("FlexOlmo", dict(pad_token_id=0, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, intermediate_size=56)),
    "mellum": ("Mellum", dict(head_dim=24, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=56,
                              sliding_window=20, layer_types=MIXED, mlp_layer_types=["sparse", "dense", "sparse"],
                              rope_parameters={"sliding_attention": PLAIN, "full_attention": LINEAR})),
    # sinks, biases of the router and the experts, clamped gates, rows of gate and up in turn; the same with experts in MXFP4
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss_mxfp4": ("GptOss", GPT_OSS),
    # a dense layer, then experts with sigmoids, chosen with a bias, beside two for all tokens; a part of each head rotated
    "glm4_moe": ("Glm4Moe", dict(head_dim=24, num_hidden_layers=3, rope_parameters=PARTIAL, attention_bias=True, use_qk_norm=True,
                                 n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=56, n_shared_experts=2,
                                 first_k_dense_replace=1, routed_scaling_factor=1.5)),
    # experts chosen within two of four groups; windows in all layers but the first
    "dots1": ("Dots1", dict(num_hidden_layers=3, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=56, n_shared_experts=1,
                            first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
                            sliding_window=20, max_window_layers=1)),
    # norms of q and k over all heads; experts with sigmoids and a bias in all layers
    "minimax_m2": ("MiniMaxM2", dict(head_dim=24, rope_parameters=PARTIAL, num_local_experts=6, num_experts_per_tok=2)),
    # sigmoids with a bias; windows, and layers without a window that are not rotated
    "exaone_moe": ("ExaoneMoe", dict(head_dim=24, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=56,
                                     num_shared_experts=1, sliding_window=20, layer_types=MIXED,
                                     mlp_layer_types=["sparse", "dense", "sparse"])),
    # a softmax with a bias for the choice alone, beside two for all tokens; neighbouring pairs rotated
    "ernie4_5_moe": ("Ernie4_5_Moe", dict(num_hidden_layers=3, moe_num_experts=6, moe_k=2, moe_intermediate_size=56,
                                          moe_num_shared_experts=2, moe_layer_start_index=1)),
    # weights in fp8 with a scale for each block, or for each row
    "llama_fp8": ("Llama", dict(rope_parameters=PLAIN, head_dim=24)),
    "qwen3_moe_fp8": ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=56, head_dim=24,
                                       norm_topk_prob=True)),
    "phi3_fp8_channel": ("Phi3", dict(head_dim=None, rope_parameters=PARTIAL, pad_token_id=0)),
    # quantized in the forms of `quantized.py`
    "llama_awq": ("Llama", WIDE),
    "qwen2_gptq": ("Qwen2", WIDE | dict(head_dim=None)),
    "llama_gptq_v2": ("Llama", WIDE),
    "qwen3_w4a16": ("Qwen3", WIDE),
    "mistral_w5_asym": ("Mistral", WIDE | dict(sliding_window=None)),
    "phi3_w8a8": ("Phi3", dict(head_dim=None, rope_parameters=PARTIAL, pad_token_id=0)),
    "qwen3_nvfp4": ("Qwen3", WIDE),
    "llama_mxfp4": ("Llama", WIDE),
    "qwen2_modelopt": ("Qwen2", WIDE | dict(head_dim=None)),
    # layers with a recurrent state (Gated DeltaNet), attention with an output gate, a quarter of each head rotated; projections by
    # key heads, experts and a dense layer
    "qwen3_next": ("Qwen3Next", RECURRENT | QWEN_EXPERTS | dict(mlp_only_layers=[1], attention_bias=True)),
    # the same with projections one by one; as the text part of a model that sees images; experts in all layers, one by one and stacked
    "qwen3_5": ("Qwen3_5", RECURRENT | dict(num_hidden_layers=4, layer_types=RECURRENT["layer_types"][:2] * 2,
                                            linear_num_key_heads=4, linear_num_value_heads=4)),
    "qwen3_5_vision": ("Qwen3_5", RECURRENT | dict(rope_parameters=SECTIONS)),
    "qwen3_5_moe": ("Qwen3_5Moe", RECURRENT | QWEN_EXPERTS | dict(intermediate_size=None)),
    "qwen3_5_moe_vision": ("Qwen3_5Moe", RECURRENT | QWEN_EXPERTS | dict(intermediate_size=None, rope_parameters=SECTIONS,
                                                                        tie_word_embeddings=True)),
    # recurrent layers of which the large projections are in fp8 and the small ones are not
    "qwen3_5_moe_fp8": ("Qwen3_5Moe", RECURRENT | QWEN_EXPERTS | dict(intermediate_size=None)),
    # the text parts of models that see images, with the names and the fields that transformers writes for the whole model
    "gemma3_vision": ("Gemma3", dict(head_dim=16, num_hidden_layers=3, sliding_window=20, query_pre_attn_scalar=24, layer_types=MIXED,
                                     tie_word_embeddings=True)),
    "mistral3_vision": ("Mistral3", dict(head_dim=24, sliding_window=None, rope_parameters=PLAIN)),
    "gemma4_vision": ("Gemma4", dict(head_dim=16, sliding_window=20, layer_types=MIXED[:2], global_head_dim=32,
                                     hidden_size_per_layer_input=0, tie_word_embeddings=True)),
    "llama4_vision": ("Llama4", dict(head_dim=16, no_rope_layers=[1, 0], attention_chunk_size=11, floor_scale=8, attn_scale=0.5,
                                     num_local_experts=4, moe_layers=[1], intermediate_size=56, intermediate_size_mlp=104)),
    "qwen2_5_vl_vision": ("Qwen2_5_VL", dict(head_dim=None, rope_parameters=PLAIN | {"mrope_section": [2, 3, 3]})),
    "qwen3_vl_vision": ("Qwen3VL", dict(head_dim=32, tie_word_embeddings=True, rope_parameters=PLAIN | {
        "mrope_section": [6, 5, 5], "mrope_interleaved": True})),
    # attention and feed-forward in parallel behind one norm; a layer norm for each head
    "stablelm_12b": ("StableLm", dict(head_dim=None, use_parallel_residual=True, qk_layernorm=True)),
    # latent vectors of keys and values, scaled rotation whose scores have a factor; a dense layer, then experts beside two for all tokens
    "deepseek_v2": ("DeepseekV2", LATENT | DEEPSEEK_EXPERTS | dict(
        q_lora_rank="none", n_shared_experts=2, rope_parameters=DEEPSEEK_YARN | {"mscale_all_dim": 0.707})),
    # latent vectors of queries too; experts within the two groups of the best ones; biases
    "deepseek_v2_groups": ("DeepseekV2", LATENT | DEEPSEEK_EXPERTS | dict(
        n_shared_experts=1, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
        attention_bias=True, mlp_bias=True, rope_parameters=PLAIN)),
    # sigmoids, chosen with a bias and within two of four groups
    "deepseek_v3": ("DeepseekV3", LATENT | DEEPSEEK_EXPERTS | dict(
        n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, rope_parameters=DEEPSEEK_YARN)),
    # the same without scaled rotation, whose pairs are those of Llama; with biases
    "deepseek_v3_halves": ("DeepseekV3", LATENT | DEEPSEEK_EXPERTS | dict(
        q_lora_rank="none", n_shared_experts=2, n_group=1, topk_group=1, rope_interleave=False, attention_bias=True,
        rope_parameters=PLAIN)),
    # weights in fp8 with a scale for each block
    "deepseek_v3_fp8": ("DeepseekV3", LATENT | DEEPSEEK_EXPERTS | dict(
        n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, rope_parameters=DEEPSEEK_YARN)),
    # experts in two tensors, which are transposed as published ones; a dense layer
    "qwen3_vl_moe_vision": ("Qwen3VLMoe", dict(head_dim=24, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=56,
                                               mlp_only_layers=[1], rope_parameters=PLAIN | {
                                                   "mrope_section": [4, 4, 4], "mrope_interleaved": True})),
    # latent vectors; experts within two of four groups in the layers that a list names
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | dict(
        num_hidden_layers=2, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2, n_group=4,
        topk_group=2, routed_scaling_factor=1.8, mlp_layer_types=["sparse", "dense"], attention_bias=True, rope_parameters=PLAIN)),
    # the same in dense layers, with scaled rotation
    "youtu": ("Youtu", LATENT | dict(num_hidden_layers=2, attention_bias=True, tie_word_embeddings=True, rope_parameters=DEEPSEEK_YARN)),
    # the same with three multipliers and the pairs of Llama
    "minicpm3": ("MiniCPM3", LATENT | dict(num_hidden_layers=2, scale_emb=12, scale_depth=1.4, dim_model_base=24, rope_parameters=PLAIN)),
    # the text parts of models that see images
    "kimi_k25_vision": ("Kimi_K25", LATENT | DEEPSEEK_EXPERTS | dict(
        num_hidden_layers=2, moe_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        rope_parameters=DEEPSEEK_YARN)),
    "exaone4_5_vision": ("Exaone4_5_", dict(num_hidden_layers=3, sliding_window=20, layer_types=MIXED)),
    "glm4v_vision": ("Glm4v", dict(head_dim=None, pad_token_id=0, rope_parameters=PARTIAL | {"mrope_section": [1, 1, 2]})),
    "glm4v_moe_vision": ("Glm4vMoe", dict(
        head_dim=24, attention_bias=True, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=1.5, rope_parameters=PARTIAL | {"mrope_section": [1, 2, 3]})),
    "glm46v_vision": ("Glm46V", dict(head_dim=None, pad_token_id=0, rope_parameters=PARTIAL | {"mrope_section": [1, 1, 2]})),
    # learned positions, windows of every other layer, scores that are not scaled
    "gpt_neo": ("GPTNeo", dict(head_dim=None, num_hidden_layers=None, num_attention_heads=None, num_key_value_heads=None, num_layers=2,
                               num_heads=4, window_size=20, attention_types=[[["local", "global"], 1]], tie_word_embeddings=True)),
    # experts in all layers, sigmoids with a bias and within two of four groups
    "solar_open": ("SolarOpen", dict(head_dim=24, intermediate_size=None, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
                                     moe_intermediate_size=32, n_group=4, topk_group=2, routed_scaling_factor=2.5, attention_bias=True,
                                     rope_parameters=dict(YARN))),  # Its configuration changes the dictionary.
    # sigmoids with a bias, beside two for all tokens, with biases; a dense layer between
    "hy_v3": ("HYV3", dict(head_dim=24, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
                           num_shared_experts=2, attention_bias=True, mlp_bias=True, rope_parameters=YARN,
                           mlp_layer_types=["sparse", "dense", "sparse"])),
    # attention with gates from a matrix of their own, layers without a window that are not rotated, norms on both sides
    "afmoe": ("Afmoe", dict(head_dim=24, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
                            num_shared_experts=2, num_dense_layers=1, route_scale=2.5, mup_enabled=True, attention_bias=True,
                            sliding_window=20, layer_types=MIXED, rope_parameters=YARN)),
    # sinks in all layers, rotations with two bases and a layer without one
    "granite_swa": ("GraniteSWA", GRANITE_SWA | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    # the same with experts beside one for all tokens
    "granitemoe_swa": ("GraniteMoeSWA", GRANITE_SWA | dict(intermediate_size=32, num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=64)),
    # Mamba-2 with two groups of B and C and biases of the convolution, one norm of all heads, around attention without rotation; four
    # multipliers; experts beside a feed-forward
    "granite_moe_hybrid": ("GraniteMoeHybrid", MAMBA | GRANITE_HYBRID | dict(num_local_experts=4, num_experts_per_tok=2)),
    # rotated attention, no experts, biases of projections
    "granite_hybrid_dense": ("GraniteMoeHybrid", MAMBA | GRANITE_HYBRID | dict(
        num_local_experts=0, position_embedding_type="rope", mamba_proj_bias=True, mamba_conv_bias=False)),
    # Mamba-2 with one norm of all heads, attention whose heads are rotated by half
    "bamba": ("Bamba", MAMBA | dict(num_attention_heads=5, num_key_value_heads=5, attn_layer_indices=[1], rope_parameters=PARTIAL)),
    # layers of one part: Mamba-2 with a norm for two heads, attention without rotation, experts without gates that are chosen with a
    # bias and within two of four groups
    "nemotron_h": ("NemotronH", NEMOTRON_H | dict(
        layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "moe"], n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, n_group=4, topk_group=2,
        routed_scaling_factor=2.5)),
    # experts of another width than the model, with biases of the projections
    "nemotron_h_latents": ("NemotronH", NEMOTRON_H | dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, moe_latent_size=40, mlp_bias=True)),
    # mixers without a feed-forward behind them, no experts, biases
    "nemotron_h_dense": ("NemotronH", NEMOTRON_H | dict(
        layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "full_attention"],
        intermediate_size=128, use_bias=True, mlp_bias=True, use_conv_bias=False)),
    # short convolutions of four inputs with biases around attention; an inner width that is computed: 120
    "lfm2": ("Lfm2", SHORT_CONV | dict(conv_L_cache=4, conv_bias=True, block_ffn_dim_multiplier=1.5, block_multiple_of=24, rope_parameters=YARN)),
    # experts behind a dense layer, tied embeddings
    "lfm2_moe": ("Lfm2Moe", SHORT_CONV | dict(num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                              routed_scaling_factor=1.5, tie_word_embeddings=True)),
    "lfm2_vl_vision": ("Lfm2Vl", SHORT_CONV | dict(block_auto_adjust_ff_dim=False)),
    # recurrent layers with norms before their parts around attention with norms behind; learning rates up to 2, no rotation
    "olmo_hybrid": ("OlmoHybrid", RECURRENT | dict(head_dim=None, rope_parameters={"rope_type": "default", "rope_theta": None}, linear_key_head_dim=12, pad_token_id=0)),
    # norms of q and k behind the rotation, whose base has a factor
    "hunyuan_dense": ("HunYuanDenseV1", dict(head_dim=24, attention_bias=True, tie_word_embeddings=True, rope_parameters=ALPHA)),
    # the same with experts beside a feed-forward for all tokens, of which layers choose different numbers
    "hunyuan_moe": ("HunYuanMoEV1", dict(head_dim=24, intermediate_size=32, num_experts=4, moe_topk=[1, 3], rope_parameters=ALPHA)),
    # latent vectors with queries that are longer from every eighth position on; experts within two of three groups by a softmax
    "mistral4": ("Mistral4", LATENT | dict(
        num_hidden_layers=2, intermediate_size=64, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1,
        n_group=3, topk_group=2, routed_scaling_factor=1.5, first_k_dense_replace=1, attention_bias=True, rope_parameters=DEEPSEEK_YARN | {
            "llama_4_scaling_beta": 0.4, "max_position_embeddings": 256, "partial_rotary_factor": 0.4})),
    # attention and experts in parallel, the mean of experts and of one for all tokens, by sigmoids; a dense layer that is rotated
    "cohere2_moe": ("Cohere2Moe", dict(head_dim=16, num_hidden_layers=3, intermediate_size=32, num_experts=4, num_experts_per_tok=2,
                                       num_shared_experts=1, expert_selection_fn="sigmoid", logit_scale=0.5, sliding_window=20, rms_norm_eps="none",
                                       mlp_layer_types=["dense", "sparse", "sparse"], prefix_dense_intermediate_size=64,
                                       layer_types=["full_attention", "sliding_attention", "full_attention"], attention_bias=True,
                                       tie_word_embeddings=True)),
    # the same with RMS norms, a softmax, and the sum
    "cohere2_moe_sum": ("Cohere2Moe", dict(head_dim=16, intermediate_size=32, num_experts=4, num_experts_per_tok=2, num_shared_experts=2,
                                           shared_expert_combination_strategy="sum", logit_scale=0.5, sliding_window=20,
                                           tie_word_embeddings=True)),
    # layer norms, biases, experts that are weighted among those near them. transformers uses the short factors for all sequences, the
    # publisher's code the long ones for these, so both are the same here. No product of the router is at the limit that the noise sets.
    "phimoe": ("Phimoe", dict(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.35, attention_bias=True,
                              lm_head_bias=True, sliding_window=20, rope_parameters={
                                  "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8, "short_mscale": 1.1,
                                  "long_mscale": 1.3, "short_factor": FACTORS(1.5, 8), "long_factor": FACTORS(1.5, 8)})),
    # Mamba-2 without a norm beside attention in each layer, and multipliers of all parts
    "falcon_h1": ("FalconH1", FALCON_H1 | dict(mamba_d_ssm=48, mamba_d_head=12)),
    # the same with norms
    "falcon_h1_normed": ("FalconH1", FALCON_H1 | dict(
        mamba_d_ssm=128, mamba_d_head=32, mamba_n_groups=4, mamba_conv_bias=False, mamba_rms_norm=True, mamba_norm_before_gate=False,
        tie_word_embeddings=True)),
    # Gemma 4 without an embedding for each layer
    "gemma4_unified_vision": ("Gemma4Unified", dict(head_dim=16, num_hidden_layers=3, sliding_window=20, layer_types=MIXED[:2] + MIXED[1:2],
                                                    global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
                                                    num_kv_shared_layers=1, tie_word_embeddings=True)),
    # Phi-3 beside parts for images and speech; the same with the publisher's names
    "phi4_multimodal": ("Phi4Multimodal", PHI4_MULTIMODAL),
    "phi4_mm": ("Phi4Multimodal", PHI4_MULTIMODAL),
    # heads of v that are narrower than those of k; layers with a window have sinks, other KV heads and another rotation
    "mimo_v2": ("MiMoV2Flash", dict(head_dim=24, v_head_dim=20, num_hidden_layers=3, num_key_value_heads=1, sliding_window=20, layer_types=MIXED,
                                    intermediate_size=64, mlp_layer_types=["dense", "sparse", "sparse"], n_routed_experts=4,
                                    num_experts_per_tok=2, moe_intermediate_size=32, attention_bias=True, routed_scaling_factor=1.5)),
    # in blocks of fp8, as it is published; heads of v end within a block
    "mimo_v2_fp8": ("MiMoV2Flash", dict(head_dim=24, v_head_dim=20, sliding_window=20, intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2,
                                        moe_intermediate_size=32)),
    # the publisher's fields
    "mimo_v2_published": ("MiMoV2Flash", dict(head_dim=48, v_head_dim=32, sliding_window=20, intermediate_size=64, n_routed_experts=4,
                                          num_experts_per_tok=2, moe_intermediate_size=32, n_group=2)),
    # Kimi Delta Attention around attention over latent vectors that is not rotated; experts within groups; the same in the publisher's form
    "kimi_linear": ("KimiLinear", KIMI_LINEAR | dict(num_hidden_layers=3, q_lora_rank=48, layer_types=["linear_attention", "full_attention", "linear_attention"],
                                               mlp_layer_types=["dense", "sparse", "dense"])),
    "kimi_linear_published": ("KimiLinear", KIMI_LINEAR | dict(
        q_lora_rank="none", layer_types=["linear_attention", "full_attention"], n_group=1, topk_group=1)),
    # further forms of `quantized.py`
    "llama_mxfp8": ("Llama", WIDE),
    "llama_w8a16": ("Llama", WIDE),
    "llama_gptq_sym": ("Llama", WIDE),
    "qwen2_gptq_dynamic": ("Qwen2", WIDE | dict(head_dim=None)),
    "mistral_fp8_static": ("Mistral", WIDE | dict(sliding_window=None)),
    "phi3_modelopt_fp8": ("Phi3", dict(head_dim=None, rope_parameters=PARTIAL, pad_token_id=0)),
    "qwen3_mixed": ("Qwen3", WIDE),
    "qwen3_modelopt_mixed": ("Qwen3", WIDE | dict(intermediate_size=160)),
    # GLM-4.5's formulas with the publisher's names and stacked q, k and v; experts chosen within two of four groups
    "bailing_moe_v2": ("Glm4Moe", dict(head_dim=24, num_hidden_layers=3, rope_parameters=PARTIAL, use_qk_norm=True, n_routed_experts=8,
                                       num_experts_per_tok=3, moe_intermediate_size=56, n_shared_experts=2, first_k_dense_replace=1,
                                       n_group=4, topk_group=2, routed_scaling_factor=2.5)),
}
VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=64, num_position_embeddings=4)
GLM_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=64, image_size=8)
SIGLIP = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2)
# The models of text parts that are models of their own.
TEXT_PARTS = {"Mistral3": "Mistral", "Kimi_K25": "DeepseekV3", "Exaone4_5_": "Exaone4", "Glm46V": "Glm4vText", "Lfm2Vl": "Lfm2"}
# Fields of the whole model beside those of its text part.
WHOLE = {
    "Gemma3": dict(vision_config=SIGLIP, mm_tokens_per_image=4),
    "Mistral3": dict(vision_config=SIGLIP | dict(head_dim=8)),
    "Gemma4": dict(vision_config=SIGLIP | dict(num_key_value_heads=2, head_dim=8, position_embedding_size=16)),
    "Gemma4Unified": dict(vision_config=dict(patch_size=2, pooling_kernel_size=1, mm_embed_dim=16, mm_posemb_size=4, output_proj_dims=64),
                          audio_config=dict(audio_embed_dim=16)),
    "Llama4": dict(vision_config=SIGLIP | dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)),
    "Qwen3VL": dict(vision_config=VISION | dict(deepstack_visual_indexes=[0])),
    "Qwen3VLMoe": dict(vision_config=VISION | dict(deepstack_visual_indexes=[0])),
    "Kimi_K25": dict(vision_config=dict(patch_size=2, pos_emb_height=4, pos_emb_width=4, num_attention_heads=2, num_hidden_layers=1,
                                        hidden_size=16, intermediate_size=16), projection_hidden_size=16),
    "Exaone4_5_": dict(vision_config=GLM_VISION | dict(num_key_value_heads=2, fullatt_block_indexes=[0])),
    "Glm4v": dict(vision_config=GLM_VISION), "Glm4vMoe": dict(vision_config=GLM_VISION), "Glm46V": dict(vision_config=GLM_VISION),
    "Lfm2Vl": dict(vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_patches=16, patch_size=2),
                   projector_hidden_size=16),
}
# Sequences that transformers would begin with the short factors.
LONG_PROMPTS = dict.fromkeys(("phi3_longrope", "phimoe", "phi4_multimodal", "phi4_mm"), (9, 20, 40))


def family_case(name):
    """The row of CASES for a name of FAMILIES."""
    model_type, own = FAMILIES[name]
    text = "Text" if model_type in ("Gemma3", "Gemma4", "Gemma4Unified", "Llama4", "Qwen3_5", "Qwen3_5Moe", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Glm4v", "Glm4vMoe") else ""
    task = "ConditionalGeneration" if name.endswith("_vision") else "CausalLM"
    shape = SMALL | own
    dtype = torch.bfloat16 if "fp" in name or name in quantized.FORMS else torch.float16  # its values are those of bf16
    return dtype, getattr(transformers, f"{TEXT_PARTS.get(model_type, model_type)}{text}Config"), getattr(transformers, f"{model_type}For{task}"), {
        key: None if value == "none" else value for key, value in shape.items() if value is not None}


def make_model(dtype, config_class, model_class, shape, seed):
    """A random model whose weights are exact in `dtype`, computing in fp32."""
    common = {} if config_class is GPT2Config else dict(max_position_embeddings=256)
    if hasattr(config_class, "rms_norm_eps") and "rms_norm_eps" not in shape:
        common["rms_norm_eps"] = 1e-5
    config = config_class(bos_token_id=1, eos_token_id=2, **common, **shape)
    if "Conditional" in model_class.__name__:
        tied = config.tie_word_embeddings
        whole = WHOLE.get(model_class.__name__.removesuffix("ForConditionalGeneration"), dict(vision_config=VISION))
        config = model_class.config_class(text_config=config.to_dict(), tie_word_embeddings=tied, **whole)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if ("norm" in name or ".ln_" in name or "router." in name and "scale" in name) and "bias" not in name:
                is_from_one = config.model_type in FROM_ONE and "linear_attn" not in name
                values = 0.2 * noise if is_from_one else 1 + 0.2 * noise
            elif name.endswith(("A_log", "dt_bias")):
                values = noise - 1  # A state that lasts some ten positions.
            elif parameter.dim() == 1:
                values = 0.1 * noise
            elif any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
                values = noise * (0.1 if "gemma" in config.model_type else 0.3 if config.tie_word_embeddings else 1.0)
            else:
                inputs = parameter.shape[0 if config_class is GPT2Config else 1]
                values = noise * 1.2 * inputs ** -0.5
            parameter.copy_(values.to(dtype).float())
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_((0.5 + torch.rand(1, generator=generator)).to(dtype).float())
            elif name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
                buffer.copy_((0.3 * torch.randn(buffer.shape, generator=generator)).to(dtype).float())
    return config, model


@torch.no_grad()
def golden(logits_of, prompt):
    """Greedy continuation by full forward passes, without a cache and with a batch of one."""
    tokens, margins, first = list(prompt), [], None
    for _ in range(NUM_TOKENS):
        logits = logits_of(tokens)
        first = logits if first is None else first
        best = logits.topk(2).values
        margins.append(round((best[0] - best[1]).item(), 6))
        tokens.append(int(logits.argmax()))
    return {"prompt": prompt, "logits": [round(x, 5) for x in first.tolist()],
            "tokens": tokens[len(prompt):], "margins": margins}


def save(folder, name, dtype, config, tensors):
    """Writes weights in one of the formats of published checkpoints."""
    kept = lambda key, tensor: not tensor.is_floating_point() or tensor.element_size() == 1 or key.endswith(("scales", "scale", "scale_inv", "scale_2"))
    tensors = {key: (tensor if kept(key, tensor) else tensor.to(dtype)).contiguous() for key, tensor in tensors.items()}
    if name == "internlm":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif name == "gpt2":
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif name == "baichuan2_7b":
        keys, files = list(tensors), {}
        for number, part in enumerate((keys[::2], keys[1::2]), 1):
            file = f"pytorch_model-{number:05}-of-00002.bin"
            torch.save({key: tensors[key] for key in part}, folder / file)
            files |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": files}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    finite = lambda value: ({key: finite(of) for key, of in value.items()} if isinstance(value, dict) else
                            [finite(of) for of in value] if isinstance(value, (list, tuple)) else
                            {"__float__": "Infinity"} if value == float("inf") else value)  # As transformers saves it.
    (folder / "config.json").write_text(json.dumps(finite(config), indent=2) + "\n")


def as_saved(name, model):
    """The tensors of a model with the names that its checkpoints have. Experts have others in memory, which some publishers keep."""
    is_whole = "Conditional" in type(model).__name__
    if name == "qwen3_5_moe_vision" or not is_whole and not any(".experts." in key for key in model.state_dict()):
        return model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(pathlib.Path(folder) / "model.safetensors")
    is_transposed = lambda key: name == "qwen3_vl_moe_vision" and ".experts." in key
    # transformers takes the layers of this text model for those of the images.
    own_key = lambda key: key.replace(".model.blocks.", ".model.layers.") if name == "kimi_k25_vision" else key
    return {own_key(key): tensor.transpose(1, 2) if is_transposed(key) else tensor for key, tensor in tensors.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parents[2]
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=root / "tests" / "goldens")
    parser.add_argument("--only", nargs="+", choices=[*CASES, *FAMILIES], help="make only these cases")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for number, name in enumerate([*CASES, *FAMILIES]):
        if arguments.only and name not in arguments.only:
            continue
        seed = number if number < NUM_NUMBERED else zlib.crc32(name.encode())
        dtype, config_class, model_class, shape = CASES[name] if name in CASES else family_case(name)
        config, model = make_model(dtype, config_class, model_class, shape, seed)
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        config.architectures = [model_class.__name__]
        tied = config.tie_word_embeddings
        own_head = ("lm_head.weight", "embed_out.weight")
        tensors = {k: v for k, v in as_saved(name, model).items() if not (k in own_head and tied)}
        config.dtype = dtype  # Saving has set it to the reference's.
        published_config, published_tensors, logits_of = published.variant(name, config, model, tensors)
        save(folder, name, dtype, published_config, published_tensors)
        generator = torch.Generator().manual_seed(100 + seed)
        vocab_size = config.get_text_config().vocab_size
        prompts = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LONG_PROMPTS.get(name, PROMPT_LENS)]
        goldens = [golden(logits_of, prompt) for prompt in prompts]
        (folder / "golden.json").write_text(json.dumps({"sequences": goldens}) + "\n")
        margins = sorted(m for g in goldens for m in g["margins"])
        size = sum(f.stat().st_size for f in folder.iterdir())
        print(f"{name}: {size / 1024:.0f} KiB, margins {margins[0]:.4f} .. {margins[len(margins) // 2]:.3f}")


if __name__ == "__main__":
    main()
