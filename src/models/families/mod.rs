//! The supported architectures: the names of their weights, the defaults of their fields, and what their forward pass
//! does differently from Llama's.
//!
//! A family like Llama is a row of [`table::FAMILIES`]. What a row cannot say is a function in `adjust`.

mod adjust;
#[cfg(test)]
mod architecture_table;
mod bailing;
mod cohere2_moe;
mod deepseek;
mod eagle3;
mod experts;
mod falcon_h1;
mod family;
mod gemma4;
mod granite;
mod harmless;
mod hunyuan;
mod hybrid;
mod kimi_linear;
mod layer_types;
mod lfm2;
mod llama4;
mod mimo_v2;
mod mistral4;
mod mtp;
mod nemotron_h;
mod older;
mod phimoe;
mod quantization;
mod read;
mod table;
#[cfg(test)]
mod tests;
mod weights;

pub(crate) use eagle3::read_eagle3;
pub(crate) use family::{AttentionBias, BiasRule, Family, NormRule, WindowRule};

/// The names of the supported architectures.
pub fn architectures() -> Vec<&'static str> {
    table::FAMILIES.iter().map(|family| family.name).collect()
}

/// The architecture with this name in `architectures`.
pub(crate) fn find(name: &str) -> Option<&'static Family> {
    table::FAMILIES.iter().find(|family| family.name == name)
}

/// The architecture with this `model_type`.
pub(crate) fn find_by_model_type(model_type: &str) -> Option<&'static Family> {
    let has = |family: &&Family| family.model_type == model_type || family.other_model_type == Some(model_type);
    table::FAMILIES.iter().find(has)
}
