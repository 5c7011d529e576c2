"""Architectures that transformers does not contain: names of their settings and weights, and a reference for their logits.

Each is a Llama, Ling 2.0 a GLM-4.5, with other names and another layout of q, k and v. Baichuan 2 has a head with rows of length 1 (section 2.3.1 of its
report), and the larger Baichuan models have ALiBi instead of rotary embeddings (Press et al. 2022).
"""
import math
import tempfile

import torch
from safetensors.torch import save_file
from torch.nn import functional

import quantized


def variant(name, config, model, tensors):
    """Configuration and tensors as published, and a function from tokens to the logits of the last."""
    plain = lambda tokens: model(torch.tensor([tokens])).logits[0, -1]
    if name == "internlm":
        return as_published(config, "InternLMForCausalLM", "internlm", bias=True,
                            rotary={"base": 10000, "type": "dynamic"}), tensors, plain
    if name == "internlm2":
        fields = as_published(config, "InternLM2ForCausalLM", "internlm2", bias=False, rope_theta=1000000,
                              rope_scaling={"type": "dynamic", "factor": 2.0})
        return fields, internlm2(config, tensors), plain
    if name == "baichuan2_7b":
        stored = baichuan(config, tensors)
        unit_head(model)
        return as_published(config, "BaichuanForCausalLM", "baichuan", z_loss_weight=0), stored, plain
    if name == "baichuan2_13b_f32":
        stored = baichuan(config, tensors)
        check(config, model, tensors)
        unit_head(model)
        fields = as_published(config, "BaichuanForCausalLM", "baichuan", z_loss_weight=0, model_max_length=256)
        del fields["max_position_embeddings"]
        return fields, stored, lambda tokens: decoder(config, model.state_dict(), tokens, alibi=True)
    if name == "bailing_moe_v2":
        fields = as_published(
            config, "BailingMoeV2ForCausalLM", "bailing_moe", first_k_dense_replace=1, moe_intermediate_size=56,
            moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=112, n_group=4, topk_group=2, norm_topk_prob=True,
            num_experts=8, num_experts_per_tok=3, num_nextn_predict_layers=0, num_shared_experts=2, rope_scaling=None,
            rope_theta=config.rope_parameters["rope_theta"], partial_rotary_factor=config.rope_parameters["partial_rotary_factor"],
            routed_scaling_factor=2.5, router_dtype="fp32", score_function="sigmoid", use_bias=False, use_qk_norm=True, use_qkv_bias=False)
        return fields, bailing(config, tensors), plain
    if name == "olmo_hybrid":  # transformers joins the convolutions of q, k and v when it loads them, and saves others.
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        for key in [key for key in tensors if key.endswith("conv1d.weight")]:
            joined = tensors.pop(key)
            for part, tensor in zip("qkv", joined.split([keys, keys, len(joined) - 2 * keys])):
                tensors[key.replace("conv1d", f"{part}_conv1d")] = tensor
    if name == "mimo_v2_published":
        fields = config.to_diff_dict() | {
            "architectures": config.architectures, "dtype": "float16", "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1],
            "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5, "swa_head_dim": 48,
            "swa_v_head_dim": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "sliding_window_size": 20,
            "attention_chunk_size": 20, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
            "hybrid_block_size": None, "n_shared_experts": None, "routed_scaling_factor": None, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc"}
        own = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")
        return {key: value for key, value in fields.items() if key not in own}, tensors, plain
    if name.startswith("kimi_linear"):
        # transformers saves dense layers with the names of experts, which no published file has.
        dense = ("block_sparse_moe.gate_proj", "block_sparse_moe.up_proj", "block_sparse_moe.down_proj")
        own = lambda key: key.replace("block_sparse_moe", "mlp") if key.removesuffix(".weight").endswith(dense) and "shared" not in key else key
        tensors = {own(key): tensor for key, tensor in tensors.items()}
    if name == "kimi_linear_published":
        fields = config.to_diff_dict() | {
            "architectures": config.architectures, "dtype": "float16", "first_k_dense_replace": 1, "head_dim": 72, "mla_use_nope": True,
            "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0, "rope_scaling": None,
            "rope_theta": 10000.0, "use_grouped_topk": True, "linear_attn_config": {
                "full_attn_layers": [2], "kda_layers": [1], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}}
        own = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim")
        return {key: value for key, value in fields.items() if key not in own}, tensors, plain
    if name == "phi4_mm":
        return *phi4_mm(config, tensors), plain
    if name == "gpt_oss_mxfp4":
        tensors = mxfp4(model, tensors)
        config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    if name in quantized.FORMS:
        config.quantization_config, tensors, read = quantized.quantized(name, tensors)
        model = reloaded(model, read)
        plain = lambda tokens: model(torch.tensor([tokens])).logits[0, -1]
    elif "fp8" in name:
        block = None if name.endswith("channel") else (32, 16)
        model, tensors = fp8(model, tensors, block)
        plain = lambda tokens: model(torch.tensor([tokens])).logits[0, -1]
        config.quantization_config = COMPRESSED if block is None else {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
            "modules_to_not_convert": ["lm_head"]}
    fields = config.to_diff_dict() | {"architectures": config.architectures}
    fields["dtype"] = str(config.dtype).removeprefix("torch.")
    return fields, tensors, plain


def phi4_mm(config, tensors):
    """The publisher's form of Phi-4-multimodal: adapters for images and speech stand beside the layers, which have another name."""
    stored = {}
    for key, tensor in tensors.items():
        if not key.startswith("model.layers.") or "_proj." not in key:
            stored[key] = tensor
            continue
        module = key.removesuffix(".weight")
        stored[module + ".base_layer.weight"] = tensor
        for part in ("vision", "speech"):
            stored |= {f"{module}.lora_A.{part}.weight": torch.ones(2, tensor.shape[1]), f"{module}.lora_B.{part}.weight": torch.ones(len(tensor), 2)}
    rope = config.rope_parameters
    fields = as_published(
        config, "Phi4MMForCausalLM", "phi4mm", attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1,
        partial_rotary_factor=0.75, original_max_position_embeddings=8, sliding_window=config.sliding_window, rope_theta=10000.0,
        embd_layer={"embedding_cls": "image_audio"}, img_processor=None, audio_processor={"name": "cascades"}, vision_lora={"r": 2},
        speech_lora={"r": 2}, rope_scaling={"type": "longrope", "long_factor": rope["long_factor"], "short_factor": rope["short_factor"]})
    return fields, {key: tensor for key, tensor in stored.items() if "embed_tokens_extend" not in key}


COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}}}}


@torch.no_grad()
def fp8(model, tensors, block):
    """A model whose linear layers have the values of weights in fp8, rounded to bf16, and the tensors as they are stored. There
    is a scale for each block, or for each row."""
    stored, read = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")):
            stored[name] = read[name] = tensor
            continue
        rows, cols = tensor.shape
        height, width = block or (1, cols)
        padded = functional.pad(tensor.float(), (0, -cols % width, 0, -rows % height))
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [rows, height, cols, width] of blocks
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        small = (blocks / scales.clamp(min=1e-12)).to(torch.float8_e4m3fn)
        flat = lambda blocks: blocks.flatten(2, 3).flatten(0, 1)[:rows, :cols]
        stored[name] = flat(small.view(torch.uint8)).contiguous().view(torch.float8_e4m3fn)
        stored[name + ("_scale_inv" if block else "_scale")] = scales[:, 0, :, 0].contiguous()
        read[name] = flat(small.float() * scales).bfloat16().float()
    return reloaded(model, read), stored


def reloaded(model, tensors):
    """The same model with other weights, computing in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        fields = {key: value for key, value in model.config.to_diff_dict().items() if key != "quantization_config"}
        type(model.config)(**fields).save_pretrained(folder)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder + "/model.safetensors", {"format": "pt"})
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def mxfp4(model, tensors):
    """The same tensors with the experts in MXFP4. The model gets the values that transformers reads from them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    parameters, stored = dict(model.named_parameters()), {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
        # The largest magnitude of a block becomes at most 6.
        exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        scaled = groups / exponents.exp2()
        indices = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1) + 8 * (scaled < 0)
        blocks = (indices[..., ::2] + 16 * indices[..., 1::2]).to(torch.uint8)
        scales = (exponents.squeeze(-1) + 127).to(torch.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        parameters[name].copy_(convert_moe_packed_tensors(blocks, scales).float())
    return stored


def as_published(config, architecture, model_type, **own):
    kept = ("bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
            "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps",
            "tie_word_embeddings", "vocab_size")
    fields = {key: getattr(config, key) for key in kept if hasattr(config, key)}
    if model_type in ("internlm", "baichuan"):
        del fields["num_key_value_heads"], fields["head_dim"]
    dtype = str(config.dtype).removeprefix("torch.")
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": dtype, **fields, **own}


def under_other_names(tensors, names):
    """The tensors under the publisher's names, without those of attention that have none."""
    stored = {}
    for key, tensor in tensors.items():
        for old, new in names.items():
            key = key.replace(old, new)
        if "self_attn" not in key:
            stored[key] = tensor
    return stored


def internlm2(config, tensors):
    """Packs the queries, key and value of each KV head together into `wqkv`."""
    names = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
             "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
             "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    stored = under_other_names(tensors, names)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        groups = [tensors[f"{prefix}self_attn.{part}_proj.weight"].view(
            config.num_key_value_heads, -1, config.head_dim, config.hidden_size) for part in "qkv"]
        stored[prefix + "attention.wqkv.weight"] = torch.cat(groups, 1).reshape(-1, config.hidden_size)
    return stored


def bailing(config, tensors):
    """Stacks q, k and v, under the publisher's names."""
    names = {"model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
             "self_attn.k_norm": "attention.key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias"}
    stored = under_other_names(tensors, names)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        parts = [tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
        stored[prefix + "attention.query_key_value.weight"] = torch.cat(parts)
    return stored


def baichuan(config, tensors):
    """Stacks q, k and v in `W_pack`."""
    stored = {key: tensor.clone() for key, tensor in tensors.items() if not key.endswith(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight"))}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn."
        parts = [tensors[f"{prefix}{part}_proj.weight"] for part in "qkv"]
        stored[prefix + "W_pack.weight"] = torch.cat(parts)
    return stored


@torch.no_grad()
def unit_head(model):
    """Normalizes the rows of the head to length 1, as at inference. The checkpoint contains them as trained."""
    model.lm_head.weight.copy_(functional.normalize(model.lm_head.weight))


def check(config, model, tensors):
    """Checks that the reference below agrees with transformers for rotary embeddings."""
    tokens = list(range(3, 40))
    ours, theirs = decoder(config, tensors, tokens, alibi=False), model(torch.tensor([tokens])).logits[0, -1]
    assert (ours - theirs).abs().max() < 1e-4, (ours - theirs).abs().max()


def slopes(heads):
    """ALiBi slopes, one per head. If the number of heads is no power of two, they come from the powers below and above."""
    series = lambda n: [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    below = 2 ** math.floor(math.log2(heads))
    return torch.tensor(series(below) + series(2 * below)[0::2][:heads - below])


@torch.no_grad()
def decoder(config, weights, tokens, alibi):
    """Logits of the last token, computed from the formulas, with separate K and V for each head."""
    heads, length, eps = config.num_attention_heads, len(tokens), config.rms_norm_eps
    positions = torch.arange(length)
    distance = positions[None, :] - positions[:, None]  # key - query
    bias = torch.zeros(length, length).masked_fill(distance > 0, float("-inf"))[None]
    if alibi:
        bias = bias + slopes(heads)[:, None, None] * distance
    frequencies = 10000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    turn = torch.polar(torch.ones(length, config.head_dim // 2), torch.outer(positions, frequencies))

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weights[name + ".weight"]

    def linear(x, name):
        return x @ weights[name + ".weight"].T

    def rotated(x):
        halves = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((halves.real, halves.imag), -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        normed = norm(x, prefix + "input_layernorm")
        q, k, v = (linear(normed, f"{prefix}self_attn.{part}_proj").view(length, heads, -1).transpose(0, 1)
                   for part in "qkv")
        if not alibi:
            q, k = rotated(q), rotated(k)
        scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim) + bias
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + linear(attended, prefix + "self_attn.o_proj")
        normed = norm(x, prefix + "post_attention_layernorm")
        gate = functional.silu(linear(normed, prefix + "mlp.gate_proj"))
        x = x + linear(gate * linear(normed, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")[-1]
