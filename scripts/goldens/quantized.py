"""Quantized forms of tiny checkpoints. Each is written and read again by the programs that publish such checkpoints:
`compressed-tensors`, `autoawq`, `auto-gptq` and `nvidia-modelopt` (`pip install --no-deps`); the reference computes with the values that
they read, rounded to bf16.
"""
import importlib.util
import pathlib

import torch
from torch import nn

INTEGERS = lambda bits, strategy, **more: dict(num_bits=bits, type="int", strategy=strategy, **more)
FLOATS = lambda bits, strategy, **more: dict(num_bits=bits, type="float", strategy=strategy, **more)
NVFP4 = FLOATS(4, "tensor_group", group_size=16)
FORMS = {
    "llama_awq": ("awq", {}),
    "qwen2_gptq": ("gptq", dict(bits=4, act_order=True)),
    "llama_gptq_v2": ("gptq", dict(bits=3, act_order=False, v2=True)),
    "qwen3_w4a16": ("pack-quantized", INTEGERS(4, "group", group_size=32)),
    "mistral_w5_asym": ("pack-quantized", INTEGERS(5, "group", group_size=16, symmetric=False)),
    "phi3_w8a8": ("int-quantized", INTEGERS(8, "channel")),
    "qwen3_nvfp4": ("nvfp4-pack-quantized", NVFP4),
    "llama_mxfp4": ("mxfp4-pack-quantized", FLOATS(4, "group", group_size=32)),
    "qwen2_modelopt": ("modelopt", NVFP4),
    "llama_mxfp8": ("mxfp8-quantized", FLOATS(8, "group", group_size=32, scale_dtype=torch.uint8)),
    "llama_w8a16": ("pack-quantized", INTEGERS(8, "group", group_size=32)),
    "llama_gptq_sym": ("gptq", dict(bits=8, act_order=False, sym=True)),
    "qwen2_gptq_dynamic": ("gptq", dict(bits=4, act_order=False, layers={
        "self_attn.o_proj": None, "mlp.down_proj": ("gptq", dict(bits=8, act_order=False))})),
    "mistral_fp8_static": ("fp8", dict(algorithm="FP8")),
    "phi3_modelopt_fp8": ("modelopt", dict(algorithm="FP8")),
    # The first layer whose part of a name is in a key has its form; None leaves it as it is.
    "qwen3_mixed": ("mixed-precision", dict(layers={
        "0.mlp.down_proj": None, "mlp.down_proj": ("pack-quantized", INTEGERS(8, "group", group_size=32)),
        "self_attn": ("float-quantized", FLOATS(8, "channel")), "mlp": ("pack-quantized", INTEGERS(4, "group", group_size=32))})),
    "qwen3_modelopt_mixed": ("modelopt", dict(layers={
        "0.self_attn.o_proj": None, "q_proj": ("modelopt", dict(algorithm="FP8")), "k_proj": ("modelopt", dict(algorithm="FP8_PER_CHANNEL_PER_TOKEN")),
        "v_proj": ("modelopt", dict(algorithm="MXFP8")), "o_proj": ("modelopt", NVFP4), "mlp.up_proj": ("modelopt", dict(algorithm="MXFP8")),
        "mlp": ("modelopt", dict(algorithm="FP8_PB_WO"))})),
}


def quantized(name, tensors):
    """`quantization_config`, the tensors as they are stored, and the tensors with the values that are read from them."""
    stored, read, forms = {}, {}, {}
    for key, tensor in tensors.items():
        layer = form_of(name, key) if key.endswith("proj.weight") else None
        if layer is None:
            stored[key] = read[key] = tensor
            continue
        form, own = layer
        make = {"awq": awq, "gptq": gptq}.get(form, modelopt if "algorithm" in own else compressed)
        forms[key.removesuffix(".weight")] = layer
        prefix = key.removesuffix("weight")
        parts, values = make(tensor.float(), form, own)
        stored |= {prefix + end: part for end, part in parts.items()}
        read[key] = values.bfloat16().float()
    return config_of(*FORMS[name], forms), stored, read


def form_of(name, key):
    """The form of a layer; none if it is not quantized."""
    form, own = FORMS[name]
    default = None if form == "mixed-precision" else (form, own)
    return next((of for part, of in own.get("layers", {}).items() if part in key), default)


def config_of(form, own, forms):
    """`forms` has the form of each quantized layer."""
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": None}
    if form == "gptq":
        config = {"quant_method": "gptq", "bits": own["bits"], "group_size": 32, "desc_act": own["act_order"], "sym": own.get("sym", False),
                  "checkpoint_format": "gptq_v2" if own.get("v2") else "gptq", "damp_percent": 0.01, "lm_head": False}
        rules = {f"+:.*{part}": {"bits": of[1]["bits"]} if of else {} for part, of in own.get("layers", {}).items()}
        rules = {rule if of else "-" + rule[1:]: of for rule, of in rules.items()}
        return config | ({"dynamic": rules} if rules else {})
    if form == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    if form == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": own.get("algorithm", "NVFP4"), "ignore": ["lm_head"], "producer": {"name": "modelopt"},
                  "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
        if "layers" not in own:
            return config
        # ModelOpt writes the name of blocks in small letters.
        algorithm = lambda own: {"FP8_PB_WO": "fp8_pb_wo"}.get(own.get("algorithm"), own.get("algorithm", "NVFP4"))
        del config["kv_cache_scheme"]
        return config | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            layer: {"quant_algo": algorithm(own)} for layer, (_, own) in forms.items()}}
    group = lambda own, targets, **more: {"targets": targets, "weights": {"symmetric": True, "dynamic": False} | {
        key: str(value) if key == "scale_dtype" else value for key, value in own.items()}, "input_activations": None} | more
    groups, ignored = [group(own, ["Linear"])], []
    if form == "mixed-precision":
        parts = [(part, of) for part, of in own["layers"].items() if of]
        groups = [group(of[1], [f"re:.*{part}.*"], format=of[0]) for part, of in parts]
        ignored = [f"re:.*{part}" for part, of in own["layers"].items() if not of]
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head", *ignored],
            "config_groups": {f"group_{number}": each for number, each in enumerate(groups)}}


def modelopt(weight, form, own):
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor

    algorithm, rows, cols = own["algorithm"], *weight.shape
    tensor, options = FP8QTensor, {}
    if algorithm == "FP8":
        scale = weight.abs().amax() / 448
    elif algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = weight.abs().amax(1) / 448
    elif algorithm == "FP8_PB_WO":
        padded = nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
        scale = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3), keepdim=True) / 448
        options = {"block_sizes": {-1: 128, -2: 128}}
    else:
        tensor, scale = MXFP8QTensor, MXFP8QTensor.get_weights_scaling_factor(weight)
    names = {"FP8_PER_CHANNEL_PER_TOKEN": "fp8_pc_pt"}
    codes = to_quantized_weight(weight, scale, names.get(algorithm, algorithm.lower()), block_size=128)
    spread = scale.flatten(1) if algorithm == "FP8_PB_WO" else scale[:, None] if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else scale
    values = tensor(weight.shape, torch.float32, codes).dequantize(torch.float32, scale=spread, **options)
    parts = {"weight": codes, "weight_scale": scale.reshape(1) if form == "fp8" else scale}
    if algorithm == "FP8":
        parts["input_scale"] = torch.tensor([0.02] if form == "fp8" else 0.02)
    return parts, values


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
    if own.get("sym"):
        scale = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / (2 ** (bits - 1) - 1)).half().float()
        zero = torch.full_like(zero, 2 ** (bits - 1))
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
