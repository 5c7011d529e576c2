"""Quantized forms of tiny checkpoints. Each is written and read again by the programs that publish such checkpoints:
`compressed-tensors`, `autoawq` and `auto-gptq` (`pip install --no-deps`); the reference computes with the values that they read, rounded
to bf16.
"""
import importlib.util
import pathlib

import torch
from torch import nn

INTEGERS = lambda bits, strategy, **more: dict(num_bits=bits, type="int", strategy=strategy, **more)
FORMS = {
    "llama_awq": ("awq", {}),
    "qwen2_gptq": ("gptq", dict(bits=4, act_order=True)),
    "llama_gptq_v2": ("gptq", dict(bits=3, act_order=False, v2=True)),
    "qwen3_w4a16": ("pack-quantized", INTEGERS(4, "group", group_size=32)),
    "mistral_w5_asym": ("pack-quantized", INTEGERS(5, "group", group_size=16, symmetric=False)),
    "phi3_w8a8": ("int-quantized", INTEGERS(8, "channel")),
    "qwen3_nvfp4": ("nvfp4-pack-quantized", dict(num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "llama_mxfp4": ("mxfp4-pack-quantized", dict(num_bits=4, type="float", strategy="group", group_size=32)),
    "qwen2_modelopt": ("modelopt", dict(num_bits=4, type="float", strategy="tensor_group", group_size=16)),
}


def quantized(name, tensors):
    """`quantization_config`, the tensors as they are stored, and the tensors with the values that are read from them."""
    form, own = FORMS[name]
    make = {"awq": awq, "gptq": gptq}.get(form, compressed)
    stored, read = {}, {}
    for key, tensor in tensors.items():
        if not key.endswith("proj.weight"):
            stored[key] = read[key] = tensor
            continue
        prefix = key.removesuffix("weight")
        parts, values = make(tensor.float(), form, own)
        stored |= {prefix + end: part for end, part in parts.items()}
        read[key] = values.bfloat16().float()
    return config_of(form, own), stored, read


def config_of(form, own):
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": None}
    if form == "gptq":
        return {"quant_method": "gptq", "bits": own["bits"], "group_size": 32, "desc_act": own["act_order"], "sym": False,
                "checkpoint_format": "gptq_v2" if own.get("v2") else "gptq", "damp_percent": 0.01, "lm_head": False}
    if form == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    weights = {"symmetric": True, "dynamic": False} | own
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


def compressed(weight, form, own):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(**own)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    grouped = weight.unflatten(1, (-1, arguments.group_size or weight.shape[1]))
    factor = None
    if own["strategy"] == "tensor_group":
        factor = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments, global_scale=factor)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
    if factor is not None:
        state["weight_global_scale"] = factor.reshape(1)
    packer = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized" if form == "modelopt" else form)
    parts = packer.compress(state, scheme)
    values = packer.decompress(parts, scheme)["weight"].float()
    if form == "modelopt":
        parts = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"],
                 "weight_scale_2": 1 / parts["weight_global_scale"].reshape(()), "input_scale": torch.tensor(1.0)}
    return {end: part for end, part in parts.items() if part is not None}, values


def affine(weight, bits, group):
    """Scales and zero points `[rows, groups]` that cover each group."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round().clamp(0, 2**bits - 1)


def awq(weight, form, own):
    packing = own_file("awq", "utils/packing_utils.py")
    scale, zero = affine(weight, 4, 32)
    spread = lambda values: values.repeat_interleave(32, 1)
    integers = (weight / spread(scale) + spread(zero)).round().clamp(0, 15).int()

    def packed(integers):
        words = integers.unflatten(1, (-1, 8))[:, :, packing.AWQ_ORDER].long() << torch.arange(0, 32, 4)
        return words.sum(-1).to(torch.int32)

    parts = {"qweight": packed(integers.t()), "qzeros": packed(zero.int().t()), "scales": scale.t().half()}
    values = packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, 32)
    return parts, values.t()


def gptq(weight, form, own):
    layers = own_file("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py")
    rows, cols = weight.shape
    bits, order = own["bits"], torch.arange(cols)
    if own["act_order"]:
        order = torch.randperm(cols, generator=torch.Generator().manual_seed(cols))
    scale, zero = affine(weight[:, order], bits, 32)
    groups = torch.empty(cols, dtype=torch.int32)
    groups[order] = torch.arange(cols, dtype=torch.int32) // 32
    linear = nn.Linear(cols, rows, bias=False)
    linear.weight.data = weight
    layer = layers.QuantLinear(bits, 32, cols, rows, False, weight_dtype=torch.float32)
    layer.pack(linear, scale.clone(), zero.clone(), groups)
    values = layer(torch.eye(cols)).t()
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": scale.t().half(), "g_idx": layer.g_idx}
    if own.get("v2"):
        # The second version stores the zero points as they are. `pack` stores them less 1.
        layer.pack(linear, scale.clone(), zero + 1, groups)
        parts["qzeros"] = layer.qzeros
        del parts["g_idx"]
    return parts, values


def own_file(package, path):
    """A file of a package, without the package's other files."""
    folder = importlib.util.find_spec(package).submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[:-3], pathlib.Path(folder) / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
