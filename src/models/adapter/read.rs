//! Reads an adapter that PEFT has saved, and checks it against the model before it takes memory.

use std::collections::BTreeMap;
use std::path::Path;

use ops::TensorParallel;

use super::config::AdapterConfig;
use super::targets::{LayerPart, Target, targets};
use super::{Adapter, AdapterBounds, AdapterError, Element, LowRank, Matrix};
use crate::Config;
use crate::checkpoint::{HeaderEntry, split_header};
use crate::shard::Shard;

/// What PEFT writes before the name of a module.
const PREFIX: &str = "base_model.model.";

/// The two tensors of a module.
const SUFFIXES: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

impl Adapter {
    /// Reads the adapter in `dir`: `adapter_config.json` and `adapter_model.safetensors`.
    ///
    /// # Errors
    /// When a file cannot be read, the adapter has parts that are not served, or it does not fit the model or the bounds.
    pub fn read(dir: &Path, model: &Config, bounds: AdapterBounds) -> Result<Self, AdapterError> {
        let config = AdapterConfig::read(&dir.join("adapter_config.json"))?;
        let path = dir.join("adapter_model.safetensors");
        if !path.exists() && dir.join("adapter_model.bin").exists() {
            let reason =
                "only `adapter_model.bin` is there; save the adapter with `safe_serialization=True`".to_owned();
            return Err(AdapterError::Weights { path, reason });
        }
        let failed = |source| AdapterError::Read { path: path.clone(), source };
        let found = std::fs::metadata(&path).map_err(failed)?.len();
        if found > bounds.max_bytes {
            return Err(AdapterError::TooLarge { path, found, max: bounds.max_bytes });
        }
        let data = std::fs::read(&path).map_err(failed)?;
        let wrong = |reason| AdapterError::Weights { path: path.clone(), reason };
        let (body, header) = split_header(&data).map_err(wrong)?;
        let tensors = by_module(&header).map_err(wrong)?;
        let targets = all_targets(model).map_err(wrong)?;
        let mut products = Vec::with_capacity(tensors.len());
        for (name, pair) in tensors {
            let (layer, part, module) = place(name, model).map_err(wrong)?;
            let (rank, scale) = config.of_module(name, bounds.max_rank)?;
            let shape = shape((layer, part, module), &targets, name).map_err(wrong)?;
            let shapes = [[rank, shape[1]], [shape[0], rank]];
            let matrix = |index: usize| matrix(name, index, pair[index], shapes[index], body);
            let (a, b) = (matrix(0).map_err(wrong)?, matrix(1).map_err(wrong)?);
            let module = module.to_owned();
            products.push(LowRank { layer: layer as u32, module, rank: rank as u32, scale, a, b });
        }
        if products.is_empty() {
            return Err(wrong("it has no tensors".to_owned()));
        }
        Ok(Self { products })
    }
}

/// The tensors A and B of each module, by its full name.
fn by_module(header: &BTreeMap<String, HeaderEntry>) -> Result<BTreeMap<&str, [Option<&HeaderEntry>; 2]>, String> {
    let mut modules: BTreeMap<&str, [Option<&HeaderEntry>; 2]> = BTreeMap::new();
    for (tensor, entry) in header {
        let name = tensor.strip_prefix(PREFIX);
        let part = |index: usize| Some((name?.strip_suffix(SUFFIXES[index])?, index));
        let Some((module, index)) = part(0).or_else(|| part(1)) else {
            return Err(format!(
                "tensor `{tensor}` is not served; expected names like `{PREFIX}MODULE{}` of linear layers",
                SUFFIXES[0]
            ));
        };
        modules.entry(module).or_default()[index] = Some(entry);
    }
    Ok(modules)
}

/// All targets of each layer of the whole model.
pub(super) fn all_targets(model: &Config) -> Result<Vec<Vec<Target>>, String> {
    let model = model.clone().in_expert_groups(1);
    let shard = Shard::new(&model, TensorParallel { rank: 0, size: 1 }).map_err(|error| error.to_string())?;
    Ok(shard.layers.iter().enumerate().map(|(layer, shard)| targets(&model, layer, shard)).collect())
}

/// The layer of a module, the part of it if its number is that of one part alone, and its name within the layer.
fn place<'n>(name: &'n str, model: &Config) -> Result<(usize, Option<LayerPart>, &'n str), String> {
    let names = model.names;
    let in_layers = |prefix: &&str| name.strip_prefix(prefix)?.strip_prefix(names.layers)?.strip_prefix('.');
    let rest = names.prefixes.iter().find_map(in_layers);
    let split = rest.and_then(|rest| rest.split_once('.'));
    let place = split.and_then(|(number, module)| {
        let number = number.parse::<usize>().ok()?;
        let numbers = |layer: usize| model.layers[layer].numbers(layer);
        let layer = (0..model.num_layers()).find(|&layer| numbers(layer).contains(&number))?;
        let part = match numbers(layer) {
            [mixer, feed_forward] if mixer == feed_forward => None,
            [mixer, _] if mixer == number => Some(LayerPart::Mixer),
            _ => Some(LayerPart::FeedForward),
        };
        Some((layer, part, module))
    });
    place.ok_or_else(|| {
        format!(
            "module `{name}` is none of the {} layers of `{}`; adapters of heads and embeddings are not served",
            model.num_layers(),
            model.architecture
        )
    })
}

/// Outputs and inputs of a module.
pub(super) fn shape(
    (layer, part, name): (usize, Option<LayerPart>, &str),
    targets: &[Vec<Target>],
    full: &str,
) -> Result<[usize; 2], String> {
    let own = targets[layer].iter().filter(|target| part.is_none_or(|part| part == target.weight.part()));
    let all = own.flat_map(|target| target.modules.iter().map(move |module| (module, target.cols)));
    let found = all.clone().find(|(module, _)| module.name == name).map(|(module, cols)| [module.rows, cols]);
    found.ok_or_else(|| {
        let known: Vec<String> = all.map(|(module, _)| format!("`{}`", module.name)).collect();
        format!(
            "adapters of module `{full}` are not served; in this layer they may change {}; train it without the module, or merge it into \
             the model",
            known.join(", ")
        )
    })
}

/// One of the two tensors of a module.
fn matrix(
    module: &str,
    index: usize,
    entry: Option<&HeaderEntry>,
    shape: [usize; 2],
    body: &[u8],
) -> Result<Matrix, String> {
    let name = format!("{PREFIX}{module}{}", SUFFIXES[index]);
    let entry = entry.ok_or_else(|| format!("tensor `{name}` is missing"))?;
    let element = match entry.dtype.as_str() {
        "BF16" => Element::Bf16,
        "F16" => Element::F16,
        "F32" => Element::F32,
        other => return Err(format!("tensor `{name}` has dtype `{other}`, expected `BF16`, `F16` or `F32`")),
    };
    if entry.shape != shape {
        return Err(format!(
            "tensor `{name}` has shape {:?}, expected {shape:?} by the model and `adapter_config.json`",
            entry.shape
        ));
    }
    let (start, end) = entry.data_offsets;
    let len = (shape[0] * shape[1] * element.dtype().size()) as u64;
    if start > end || end > body.len() as u64 || end - start != len {
        return Err(format!("tensor `{name}` is at bytes {start}..{end}, expected {len} bytes within {}", body.len()));
    }
    let matrix = Matrix { element, cols: shape[1] as u32, data: body[start as usize..end as usize].to_vec() };
    match matrix.is_finite() {
        true => Ok(matrix),
        false => Err(format!("tensor `{name}` has values that are not finite")),
    }
}
