//! The configuration of an EAGLE-3 head, in the forms of SpecForge and EAGLE, and of speculators.

use std::path::Path;

use serde_json::Value;

use super::find;
use super::harmless::refuse_unread;
use super::quantization::weight_format;
use super::read::{decoder, defaults};
use crate::ModelError;
use crate::config::{Config, Eagle3Form};
use crate::fields::Fields;

/// Names of the architecture in the form of SpecForge and EAGLE.
const ARCHITECTURES: [&str; 2] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];

/// Fields that say how the head was trained or where, or that other fields say, too.
const IGNORED: &[&str] =
    &["speculators_config", "speculators_version", "target_model_type", "pretraining_tp", "draft_attention_backend"];

/// The head in `dir` as a model of one layer, its own form, and the width of the hidden states that it takes, if it says so. The model
/// that it guesses for has `num_layers`.
///
/// # Errors
/// Returns an error if the file cannot be read, if it is of no such head, or if a field is missing, invalid or unknown.
pub(crate) fn read_eagle3(dir: &Path, num_layers: usize) -> Result<(Config, Eagle3Form, Option<usize>), ModelError> {
    let top = Fields::read(&dir.join("config.json"))?;
    let is_speculators = top.get("speculators_model_type").is_some();
    if is_speculators {
        top.only_text("speculators_model_type", &["eagle3"])?;
    } else {
        let named = top.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str);
        if !named.is_some_and(|name| ARCHITECTURES.contains(&name)) {
            let found = top.get("architectures").unwrap_or(&Value::Null);
            let expected = format!("`{}`, or `speculators_model_type` `eagle3`", ARCHITECTURES.join("` or `"));
            return Err(top.wrong("architectures", &expected, found));
        }
    }
    top.ignore(IGNORED);
    for flag in ["norm_before_fc", "fc_norm", "norm_output"] {
        top.only(flag, false)?;
    }
    let mut form = Eagle3Form {
        layer: if is_speculators { "layers.0" } else { "midlayer" },
        taps: taps(&top, num_layers)?,
        draft_vocab_size: top.size("draft_vocab_size")?.unwrap_or(0),
        norm_before_residual: top.flag("norm_before_residual", false)?,
    };
    let target_hidden_size = top.size("target_hidden_size")?;
    let llama = find("LlamaForCausalLM").expect("Llama is a family");
    let of_layer = match is_speculators {
        true => top
            .object("transformer_layer_config")?
            .ok_or_else(|| top.wrong("transformer_layer_config", "an object", &Value::Null))?,
        false => top.object_of_itself(),
    };
    if let Some(count) = of_layer.size("num_hidden_layers")?.filter(|&count| count != 1) {
        return Err(of_layer.wrong("num_hidden_layers", "1, the only number that is supported", &Value::from(count)));
    }
    let one =
        [("num_hidden_layers".to_owned(), Value::from(1)), ("tie_word_embeddings".to_owned(), Value::from(false))];
    let fields = of_layer.with_fields(one).with_aliases(llama.aliases).with_defaults(&defaults(llama));
    let mut config = decoder(&fields, llama)?;
    let (format, stored, notes) = weight_format(&fields, llama)?;
    (config.weight_format, config.stored_quantization, config.notes) = (format, stored, notes);
    (llama.adjust)(&fields, &mut config)?;
    refuse_unread(&top, llama)?;
    if form.draft_vocab_size == 0 {
        form.draft_vocab_size = config.vocab_size;
    }
    Ok((config, form, target_hidden_size))
}

/// The layers whose inputs the head takes: those that a field names, else the usual ones.
fn taps(top: &Fields, num_layers: usize) -> Result<[usize; 3], ModelError> {
    let nested = top.object("eagle_config")?;
    if let Some(nested) = &nested {
        nested.only("use_aux_hidden_state", true)?;
    }
    let name = "eagle_aux_hidden_state_layer_ids";
    for fields in [Some(top), nested.as_ref()].into_iter().flatten() {
        let Some(found) = fields.get(name) else { continue };
        let ids =
            found.as_array().map(|ids| ids.iter().filter_map(Value::as_u64).map(|id| id as usize).collect::<Vec<_>>());
        let ids = ids.and_then(|ids| <[usize; 3]>::try_from(ids).ok());
        return ids.ok_or_else(|| fields.wrong(name, "three numbers of layers", found));
    }
    Ok([2, num_layers / 2, num_layers.saturating_sub(3)])
}
