//! How the weights of a checkpoint are quantized: `quantization_config`.

use serde_json::Value;

use super::Family;
use super::harmless::refuse_unread;
use crate::ModelError;
use crate::config::WeightFormat;
use crate::fields::Fields;

/// The format of the linear layers. The types of the tensors tell which of them are quantized.
pub(super) fn weight_format(fields: &Fields, family: &Family) -> Result<WeightFormat, ModelError> {
    let Some(quantization) = fields.object("quantization_config")? else { return Ok(WeightFormat::Plain) };
    // Names of what is not quantized, and how a part of transformers would load it.
    quantization.ignore(&["modules_to_not_convert", "ignored_layers", "ignore", "dequantize"]);
    let method = quantization.get("quant_method").cloned().unwrap_or(Value::Null);
    let format = match method.as_str() {
        Some("fp8") => fp8(&quantization)?,
        Some("compressed-tensors") => compressed_tensors(&quantization)?,
        Some(method) if family.quantizations.contains(&method) => WeightFormat::Mxfp4,
        _ => {
            let expected = "absent, `fp8`, `compressed-tensors` or, for gpt-oss, `mxfp4`; use the original checkpoint";
            return Err(quantization.wrong("quant_method", expected, &method));
        }
    };
    refuse_unread(&quantization, family)?;
    Ok(format)
}

/// fp8 as in DeepSeek's and Qwen's checkpoints: blocks, or one scale for a matrix.
fn fp8(quantization: &Fields) -> Result<WeightFormat, ModelError> {
    quantization.only_text("fmt", &["e4m3"])?;
    // Activations are not quantized here, whatever the scheme.
    quantization.only_text("activation_scheme", &["dynamic", "static"])?;
    quantization.only_text("scale_fmt", &["float", "ue8m0"])?;
    let block = match quantization.get("weight_block_size") {
        Some(value) => Some(block_size(quantization, "weight_block_size", value)?),
        None => None,
    };
    Ok(WeightFormat::Fp8 { block })
}

/// The format `float-quantized`: groups of layers with weights in fp8.
fn compressed_tensors(quantization: &Fields) -> Result<WeightFormat, ModelError> {
    quantization.only_text("format", &["float-quantized", "naive-quantized"])?;
    quantization.only_text("quantization_status", &["compressed", "frozen"])?;
    quantization.ignore(&["version", "global_compression_ratio"]);
    let null = Value::Null;
    let groups = quantization.get("config_groups").unwrap_or(&null);
    let wrong = |expected: &str, found: &Value| quantization.wrong("config_groups", expected, found);
    let weights = groups.as_object().filter(|groups| !groups.is_empty()).ok_or_else(|| wrong("an object", groups))?;
    let mut block = None;
    for weights in weights.values().map(|group| &group["weights"]) {
        let is_fp8 = weights["num_bits"] == 8 && weights["type"] == "float";
        if !is_fp8 || weights["symmetric"] == false || weights["dynamic"] == true {
            return Err(wrong("groups of weights in fp8 (`num_bits` 8, `type` `float`, symmetric, static)", weights));
        }
        match weights["strategy"].as_str() {
            Some("tensor" | "channel") => {}
            Some("block") => {
                block = Some(block_size(quantization, "config_groups", &weights["block_structure"])?);
            }
            _ => return Err(wrong("groups with the `strategy` `tensor`, `channel` or `block`", weights)),
        }
    }
    Ok(WeightFormat::Fp8 { block })
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
