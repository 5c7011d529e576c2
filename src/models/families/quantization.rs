//! How the weights of a checkpoint are quantized: `quantization_config`, or a file of its own.

use std::path::Path;

use ops::KvElements;
use serde_json::{Map, Value, json};
use settings::WeightPrecision;

use super::Family;
use super::harmless::refuse_unread;
use crate::ModelError;
use crate::config::{StoredQuantization, WeightFormat};
use crate::fields::Fields;

/// Fields that name layers, describe how a checkpoint was made, or choose kernels of other programs. The types of the tensors tell which
/// layers are quantized.
const HARMLESS: &[&str] = &[
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "modules_in_block_to_quantize",
    "dynamic",
    "lm_head",
    "dequantize",
    "version",
    "global_compression_ratio",
    "producer",
    "model_name_or_path",
    "model_file_base_name",
    "true_sequential",
    "static_groups",
    "damp_percent",
    "damp_auto_increment",
    "mse",
    "mock_quantization",
    "batch_size",
    "dataset",
    "tokenizer",
    "meta",
    "exllama_config",
    "use_exllama",
    "disable_exllama",
    "max_input_length",
    "cache_block_outputs",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "use_cuda_fp16",
    "model_seqlen",
    "pad_token_id",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "backend",
    "pack_dtype",
];

/// `quantization_config` of checkpoints that have it in a file beside `config.json`; nothing if there is none.
pub(super) fn from_other_files(dir: &Path) -> Result<Map<String, Value>, ModelError> {
    /// Name of the file, the object in it, and the value of `quant_method`.
    const FILES: [(&str, Option<&str>, &str); 3] = [
        ("hf_quant_config.json", Some("quantization"), "modelopt"),
        ("quantize_config.json", None, "gptq"),
        ("quant_config.json", None, "awq"),
    ];
    let Some((name, object, method)) = FILES.into_iter().find(|(name, ..)| dir.join(name).is_file()) else {
        return Ok(Map::new());
    };
    let file = Fields::read(&dir.join(name))?;
    let fields = match object {
        Some(object) => file.object(object)?.map(|inner| inner.to_map()).unwrap_or_default(),
        None => file.to_map(),
    };
    let config: Map<String, Value> = [("quant_method".to_owned(), json!(method))].into_iter().chain(fields).collect();
    Ok([("quantization_config".to_owned(), Value::Object(config))].into_iter().collect())
}

type Found = (WeightFormat, Option<StoredQuantization>, Vec<String>);

/// The format of the linear layers, what it is called, and what a reader of the log should know of it.
pub(super) fn weight_format(fields: &Fields, family: &Family) -> Result<Found, ModelError> {
    let Some(quantization) = fields.object("quantization_config")? else {
        return Ok((WeightFormat::Plain, None, Vec::new()));
    };
    quantization.ignore(HARMLESS);
    let method = quantization.get("quant_method").cloned().unwrap_or(Value::Null);
    let format = match method.as_str() {
        Some("fp8") => fp8(&quantization)?,
        Some("compressed-tensors") => compressed_tensors(&quantization)?,
        Some("modelopt" | "modelopt_fp4") => modelopt(&quantization)?,
        Some("awq") => awq(&quantization)?,
        Some("gptq") => gptq(&quantization)?,
        Some(method) if family.quantizations.contains(&method) => WeightFormat::Mxfp4Experts,
        _ => {
            let expected = "absent, `awq`, `compressed-tensors`, `fp8`, `gptq`, `modelopt` or, for gpt-oss, `mxfp4`; use the \
                            original checkpoint";
            return Err(quantization.wrong("quant_method", expected, &method));
        }
    };
    let mut notes = vec![
        "GPUs keep fp8, integers of 8 bits and 4-bit weights as they are; other quantized weights, and all on CPUs, are expanded to \
                          bf16 when they are loaded"
            .to_owned(),
    ];
    let kv_elements = kv_elements(&quantization, &mut notes);
    refuse_unread(&quantization, family)?;
    let method = method.as_str().unwrap_or_default().to_owned();
    let stored = StoredQuantization { precision: precision(&method, &quantization), method, kv_elements };
    Ok((format, Some(stored), notes))
}

/// The type that the checkpoint names for keys and values: `kv_cache_scheme` of compressed-tensors, `kv_cache_quant_algo` of modelopt. Their
/// constant scales are not needed, because each token gets scales of its own.
fn kv_elements(quantization: &Fields, notes: &mut Vec<String>) -> Option<KvElements> {
    let named = |name: &str| quantization.get(name).filter(|value| !value.is_null());
    let (scheme, algorithm) = (named("kv_cache_scheme"), named("kv_cache_quant_algo"));
    let of_scheme = scheme.and_then(|scheme| match (scheme["type"].as_str()?, scheme["num_bits"].as_u64()?) {
        ("float", 8) => Some(KvElements::Fp8),
        ("int", 8) => Some(KvElements::Int8),
        _ => None,
    });
    let of_algorithm = algorithm.and_then(|algorithm| match algorithm.as_str()? {
        "FP8" => Some(KvElements::Fp8),
        "INT8" => Some(KvElements::Int8),
        _ => None,
    });
    if let (None, Some(asked)) = (of_scheme.or(of_algorithm), scheme.or(algorithm)) {
        notes.push(format!("keys and values are not kept in the type that the checkpoint names for them ({asked})"));
    }
    of_scheme.or(of_algorithm)
}

/// The precision of the weights; none if it has no name, or if layers have several.
fn precision(method: &str, quantization: &Fields) -> Option<WeightPrecision> {
    let integers = |bits: Option<u64>| match bits {
        Some(4) => Some(WeightPrecision::Int4),
        Some(8) => Some(WeightPrecision::Int8),
        _ => None,
    };
    match method {
        "fp8" => Some(WeightPrecision::Fp8),
        "awq" => Some(WeightPrecision::Int4),
        "gptq" => integers(quantization.get("bits").and_then(Value::as_u64)),
        "modelopt" => {
            let name = quantization.get("quant_algo")?.as_str()?.to_uppercase();
            (name.starts_with("FP8") || name == "MXFP8").then_some(WeightPrecision::Fp8)
        }
        "compressed-tensors" => {
            let of = |group: &Value| match (group["weights"]["type"].as_str()?, group["weights"]["num_bits"].as_u64()) {
                ("float", Some(8)) => Some(WeightPrecision::Fp8),
                ("int", bits) => integers(bits),
                _ => None,
            };
            let groups = quantization.get("config_groups")?.as_object()?;
            let first = of(groups.values().next()?);
            groups.values().all(|group| of(group) == first).then_some(first)?
        }
        _ => None,
    }
}

/// fp8 as in DeepSeek's and Qwen's checkpoints: blocks, or one scale for a matrix.
fn fp8(quantization: &Fields) -> Result<WeightFormat, ModelError> {
    quantization.only_text("fmt", &["e4m3", "float8_e4m3fn"])?;
    // Scales of inputs are always computed, as in the scheme `dynamic`.
    quantization.only_text("activation_scheme", &["dynamic", "static"])?;
    quantization.only_text("scale_fmt", &["float", "ue8m0"])?;
    let block = match quantization.get("weight_block_size") {
        Some(value) => Some(block_size(quantization, "weight_block_size", value)?),
        None => None,
    };
    Ok(WeightFormat::ByTensors { block, has_fp8_inputs: true })
}

/// Weights in groups of layers, each with a form of its own.
fn compressed_tensors(quantization: &Fields) -> Result<WeightFormat, ModelError> {
    let formats = [
        "float-quantized",
        "naive-quantized",
        "int-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    ];
    quantization.only_text("format", &formats)?;
    quantization.only_text("quantization_status", &["compressed", "frozen"])?;
    // Transforms rotate activations, and sparse weights have a form of their own.
    for name in ["transform_config", "sparsity_config"] {
        let value = quantization.get(name).cloned().unwrap_or(Value::Null);
        let is_empty = value.as_object().is_none_or(Map::is_empty) || value["format"] == "dense";
        if !is_empty {
            return Err(quantization.wrong(name, "empty", &value));
        }
    }
    let null = Value::Null;
    let groups = quantization.get("config_groups").unwrap_or(&null);
    let wrong = |expected: &str, found: &Value| quantization.wrong("config_groups", expected, found);
    let groups = groups.as_object().filter(|groups| !groups.is_empty()).ok_or_else(|| wrong("an object", groups))?;
    let (mut block, mut has_fp8_inputs) = (None, true);
    for group in groups.values() {
        if !group["output_activations"].is_null() {
            return Err(wrong("groups whose `output_activations` are null", group));
        }
        let weights = &group["weights"];
        if weights["dynamic"] == true {
            return Err(wrong("groups whose weights are not `dynamic`", weights));
        }
        let known = match (weights["type"].as_str(), weights["num_bits"].as_u64(), weights["strategy"].as_str()) {
            (Some("float"), Some(8), Some("tensor" | "channel" | "group")) => true,
            (Some("float"), Some(8), Some("block")) => {
                block = Some(block_size(quantization, "config_groups", &weights["block_structure"])?);
                true
            }
            (Some("float"), Some(4), Some("tensor_group" | "group")) => true,
            (Some("int"), Some(2..=8), Some("tensor" | "channel" | "group")) => true,
            _ => false,
        };
        if !known {
            let expected = "groups of weights in fp8 (`strategy` `tensor`, `channel`, `group` or `block`), in 4-bit floats (`tensor_group` or \
                            `group`), or in integers of 2 to 8 bits (`tensor`, `channel` or `group`)";
            return Err(wrong(expected, weights));
        }
        let inputs = &group["input_activations"];
        has_fp8_inputs &= inputs["type"] == "float" && inputs["num_bits"] == 8;
    }
    Ok(WeightFormat::ByTensors { block, has_fp8_inputs })
}

fn modelopt(quantization: &Fields) -> Result<WeightFormat, ModelError> {
    quantization.ignore(&["group_size", "config_groups"]);
    let algorithms = modelopt_algorithms(quantization)?;
    let has = |name: &str| algorithms.iter().any(|algorithm| algorithm == name);
    let block = has("FP8_PB_WO").then_some([128, 128]);
    // Blocks are for weights alone.
    let has_fp8_inputs = block.is_none() && algorithms.iter().any(|name| name.starts_with("FP8") || name == "MXFP8");
    Ok(WeightFormat::ByTensors { block, has_fp8_inputs })
}

/// What ModelOpt calls the forms of the layers, in capitals; some of its files have small letters. None if it has quantized keys and
/// values alone.
fn modelopt_algorithms(quantization: &Fields) -> Result<Vec<String>, ModelError> {
    const KNOWN: [&str; 6] = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4"];
    let check = |field: &str, found: &Value| match found.as_str().map(str::to_uppercase) {
        Some(name) if KNOWN.contains(&name.as_str()) => Ok(name),
        _ => Err(quantization.wrong(field, &format!("`{}`", KNOWN.join("`, `")), found)),
    };
    let named = match quantization.text("quant_algo")? {
        None => return Ok(Vec::new()),
        Some(name) if !name.eq_ignore_ascii_case("MIXED_PRECISION") => {
            return Ok(vec![check("quant_algo", &json!(name))?]);
        }
        Some(_) => quantization.get("quantized_layers").cloned().unwrap_or(Value::Null),
    };
    let Some(layers) = named.as_object().filter(|layers| !layers.is_empty()) else {
        return Err(quantization.wrong("quantized_layers", "an object of layers with their `quant_algo`", &named));
    };
    let of_layer =
        |(layer, form): (&String, &Value)| check(&format!("quantized_layers.{layer}.quant_algo"), &form["quant_algo"]);
    layers.iter().map(of_layer).collect()
}

fn awq(quantization: &Fields) -> Result<WeightFormat, ModelError> {
    let four = |name: &str| match quantization.get(name) {
        Some(bits) if *bits != json!(4) => Err(quantization.wrong(name, "4", bits)),
        _ => Ok(()),
    };
    ["bits", "w_bit"].into_iter().try_for_each(four)?;
    // Other versions order the values of a word in another way.
    match quantization.get("version").and_then(Value::as_str) {
        Some(version) if !version.eq_ignore_ascii_case("gemm") => {
            return Err(quantization.wrong("version", "`gemm`", &json!(version)));
        }
        _ => {}
    }
    quantization.only("zero_point", true)?;
    quantization.ignore(&["group_size", "q_group_size"]);
    Ok(WeightFormat::Awq)
}

fn gptq(quantization: &Fields) -> Result<WeightFormat, ModelError> {
    quantization.only_text("checkpoint_format", &["gptq", "gptq_v2"])?;
    quantization.only("is_marlin_format", false)?;
    // The tensors tell the number of bits, the groups, their order and the zero points.
    quantization.ignore(&["bits", "group_size", "desc_act", "sym"]);
    match quantization.get("bits") {
        Some(bits) if ![2, 3, 4, 8].map(|bits| json!(bits)).contains(bits) => {
            return Err(quantization.wrong("bits", "2, 3, 4 or 8", bits));
        }
        _ => {}
    }
    // The first version stores zero points less 1.
    let zero_offset = i32::from(quantization.text("checkpoint_format")? != Some("gptq_v2"));
    Ok(WeightFormat::Gptq { zero_offset })
}

/// Rows and columns of a block.
fn block_size(fields: &Fields, name: &str, value: &Value) -> Result<[usize; 2], ModelError> {
    let size = |value: &Value| value.as_u64().filter(|size| (1..=1 << 20).contains(size)).map(|size| size as usize);
    match value.as_array().map(Vec::as_slice) {
        Some([rows, cols]) => size(rows).zip(size(cols)).map(|(rows, cols)| [rows, cols]),
        _ => None,
    }
    .ok_or_else(|| fields.wrong(name, "a block of two whole numbers of at least 1", value))
}
