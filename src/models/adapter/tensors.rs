//! Adapters as tensors of a request, as TensorRT-LLM's clients send them.
//!
//! `lora_config` has a row `(module, layer, rank)` for each linear layer, `lora_weights` a row with A and B one behind the other, filled up to the
//! longest. The factor of the adapter is part of B.

use ops::DType;

use super::read::{all_targets, shape};
use super::targets::Target;
use super::{Adapter, AdapterError, Element, LowRank, Matrix};
use crate::Config;
use crate::names::{QkvNames, UpNames};

/// TensorRT-LLM's numbers of the linear layers that are served, and its names of them.
const MODULES: [(i32, &str); 8] = [
    (0, "attn_qkv"),
    (1, "attn_q"),
    (2, "attn_k"),
    (3, "attn_v"),
    (4, "attn_dense"),
    (5, "mlp_h_to_4h"),
    (6, "mlp_4h_to_h"),
    (7, "mlp_gate"),
];

/// An adapter as tensors.
#[derive(Debug, Clone, Copy)]
pub struct AdapterTensors<'a> {
    /// `[n, 3]`: module, layer and rank.
    pub config: &'a [[i32; 3]],
    /// `[n, row_len]`, little-endian.
    pub weights: &'a [u8],
    /// Their type.
    pub dtype: DType,
    /// Elements of a row of `weights`.
    pub row_len: usize,
}

impl Adapter {
    /// The adapter of these tensors.
    ///
    /// # Errors
    /// When they do not fit the model or each other, or a rank is above `max_rank`.
    pub fn from_tensors(model: &Config, tensors: AdapterTensors<'_>, max_rank: usize) -> Result<Self, AdapterError> {
        let wrong = |reason: String| AdapterError::Tensors { reason };
        let targets = all_targets(model).map_err(wrong)?;
        let num_modules: usize = targets.iter().flatten().map(|target| target.modules.len()).sum();
        let count = tensors.config.len();
        if count == 0 || count > num_modules {
            return Err(wrong(format!("`lora_config` has {count} rows, expected 1 to {num_modules}")));
        }
        let row_bytes = tensors.row_len.checked_mul(tensors.dtype.size()).filter(|&bytes| bytes > 0);
        let row_bytes = row_bytes.filter(|bytes| bytes.checked_mul(count) == Some(tensors.weights.len()));
        let row_bytes =
            row_bytes.ok_or_else(|| wrong(format!("`lora_weights` has not the {count} rows of `lora_config`")))?;
        let mut products: Vec<LowRank> = Vec::with_capacity(count);
        for (&entry, row) in tensors.config.iter().zip(tensors.weights.chunks_exact(row_bytes)) {
            let product = product(model, &targets, entry, (row, tensors.dtype), max_rank).map_err(wrong)?;
            if products.iter().any(|it| (it.layer, &it.module) == (product.layer, &product.module)) {
                return Err(wrong(format!("`lora_config` has module {} of layer {} twice", entry[0], entry[1])));
            }
            products.push(product);
        }
        Ok(Self { products })
    }
}

/// The product of a row of both tensors.
fn product(
    model: &Config,
    targets: &[Vec<Target>],
    [module, layer, rank]: [i32; 3],
    (row, dtype): (&[u8], DType),
    max_rank: usize,
) -> Result<LowRank, String> {
    let name = module_name(model, module)?;
    let index = usize::try_from(layer).ok().filter(|&layer| layer < targets.len());
    let index = index.ok_or_else(|| format!("`lora_config` names layer {layer} of {}", targets.len()))?;
    let found = usize::try_from(rank).ok().filter(|rank| (1..=max_rank).contains(rank));
    let found = found.ok_or_else(|| {
        format!("`lora_config` has rank {rank}, expected 1 to {max_rank}, which is the model's `max_lora_rank`")
    })?;
    let [rows, cols] = shape((index, None, name), targets, name)?;
    let (size, a_len, needed) = (dtype.size(), found * cols, found * (rows + cols));
    if row.len() < needed * size {
        let have = row.len() / size;
        return Err(format!(
            "module {module} of layer {layer} with rank {rank} needs {needed} elements of `lora_weights`, and its rows have {have}"
        ));
    }
    let element = Element::of(dtype);
    let matrix = |from: usize, to: usize, cols: usize| {
        let data = row[from * size..to * size].to_vec();
        Matrix { element, cols: cols as u32, data }
    };
    let (a, b) = (matrix(0, a_len, cols), matrix(a_len, needed, found));
    if !a.is_finite() || !b.is_finite() {
        return Err(format!("module {module} of layer {layer} has values in `lora_weights` that are not finite"));
    }
    Ok(LowRank { layer: index as u32, module: name.to_owned(), rank: found as u32, scale: 1.0, a, b })
}

/// The name within a layer of the checkpoint that TensorRT-LLM's module has.
fn module_name(model: &Config, module: i32) -> Result<&'static str, String> {
    let names = model.names;
    let known = MODULES.iter().find(|(number, _)| *number == module).map(|(_, name)| *name);
    let found = match (module, &names.qkv, &names.up) {
        (0, QkvNames::Stacked(name), _) => Some(*name),
        (1..=3, QkvNames::Separate(names), _) => Some(names[module as usize - 1]),
        (1..=3, QkvNames::Gated(names), _) => Some(names[module as usize - 1]),
        (4, ..) => Some(names.out),
        (5, _, UpNames::Separate([gate, _])) => Some(*gate),
        (5, _, UpNames::Plain(up)) => Some(*up),
        (6, ..) => Some(names.down),
        (7, _, UpNames::Separate([_, up])) => Some(*up),
        _ => None,
    };
    found.ok_or_else(|| match known {
        Some(name) => format!(
            "`lora_config` names module {module} (`{name}`), which `{}` has in another form",
            model.architecture
        ),
        None => {
            format!("`lora_config` names module {module}, expected 0 to 7: attention and feed-forward of a decoder")
        }
    })
}
