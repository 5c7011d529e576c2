//! The configuration of an EAGLE-3 head, in the forms of SpecForge, EAGLE and Model Optimizer, and of speculators.

use std::path::Path;

use serde_json::Value;

use super::find;
use super::harmless::refuse_unread;
use super::quantization::weight_format;
use super::read::{decoder, defaults};
use crate::ModelError;
use crate::config::{Config, Eagle3Form, JoinedNorm};
use crate::fields::Fields;

/// Names of the architecture in the form of SpecForge and EAGLE.
const ARCHITECTURES: [&str; 2] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];

/// Fields that say how the head was trained or where, or that other fields or the tensors say, too.
const IGNORED: &[&str] = &[
    "speculators_config",
    "speculators_version",
    "embed_requires_grad",
    "target_model_type",
    "pretraining_tp",
    "draft_attention_backend",
    "has_lm_head",
];

/// Fields of `eagle_config` that have this value in every EAGLE-3 head.
const USUAL: [(&str, bool); 5] = [
    ("use_aux_hidden_state", true),
    ("use_input_layernorm_in_first_layer", true),
    ("use_last_layernorm", true),
    ("use_mtp_layernorm", false),
    ("next_layer_regular", true),
];

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
    let nested = top.object("eagle_config")?;
    let objects: Vec<&Fields> = [&top].into_iter().chain(&nested).collect();
    for fields in &objects {
        fields.ignore(IGNORED);
        USUAL.into_iter().try_for_each(|(name, value)| fields.only(name, value))?;
        if let Some(steps) = fields.size("parallel_draft_step")?.filter(|&steps| steps != 1) {
            return Err(fields.wrong("parallel_draft_step", "1, the only number that is supported", &steps.into()));
        }
    }
    let mut form = Eagle3Form {
        taps: taps(&objects, num_layers)?,
        joined_norm: joined_norm(&objects)?,
        draft_vocab_size: top.size("draft_vocab_size")?.unwrap_or(0),
        norm_before_residual: flag(&objects, "norm_before_residual")?,
        norm_output: flag(&objects, "norm_output")?,
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
    if of_layer.get("use_sliding_window").is_some() {
        of_layer.only("use_sliding_window", false)?;
        of_layer.ignore(&["sliding_window", "max_window_layers"]);
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

/// A flag of the objects, which must not contradict each other.
fn flag(objects: &[&Fields], name: &str) -> Result<bool, ModelError> {
    let mut found = None;
    for fields in objects.iter().filter(|fields| fields.get(name).is_some()) {
        let flag = fields.flag(name, false)?;
        if let Some(first) = found.filter(|first| *first != flag) {
            return Err(fields.wrong(name, &format!("`{first}`, as outside of `eagle_config`"), &flag.into()));
        }
        found = Some(flag);
    }
    Ok(found.unwrap_or(false))
}

fn joined_norm(objects: &[&Fields]) -> Result<JoinedNorm, ModelError> {
    let [each, all] = [flag(objects, "fc_norm")?, flag(objects, "norm_before_fc")?];
    match (each, all) {
        (true, true) => Err(objects[0].wrong("norm_before_fc", "`false` beside `fc_norm`", &true.into())),
        (true, false) => Ok(JoinedNorm::Each),
        (false, true) => Ok(JoinedNorm::All),
        (false, false) => Ok(JoinedNorm::None),
    }
}

/// The layers whose inputs the head takes: those that a field names, else the usual ones. Within `eagle_config` SpecForge and Model
/// Optimizer name the layers whose outputs are taken, and others those whose inputs are. The first of them tells which: it is usually the
/// output of layer 1, and so the input of layer 2. Where a list is outside of `eagle_config`, too, both name the same layers.
fn taps(objects: &[&Fields], num_layers: usize) -> Result<Vec<usize>, ModelError> {
    let name = "eagle_aux_hidden_state_layer_ids";
    let mut found = None;
    for (fields, is_nested) in objects.iter().zip([false, true]) {
        let Some(value) = fields.get(name).filter(|value| value.as_array().is_none_or(|ids| !ids.is_empty())) else {
            continue;
        };
        let ids = value.as_array().and_then(|ids| ids.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
        let ids = ids.ok_or_else(|| fields.wrong(name, "a list of numbers of layers", value))?;
        let offset = u64::from(is_nested && ids[0] == 1);
        let taps: Vec<usize> = ids.into_iter().map(|id| id.saturating_add(offset) as usize).collect();
        if let Some(first) = found.filter(|first| *first != taps) {
            let expected = format!("a list of the same layers as outside of `eagle_config`, the inputs of {first:?}");
            return Err(fields.wrong(name, &expected, value));
        }
        found = Some(taps);
    }
    let taps = found.unwrap_or_else(|| vec![2, num_layers / 2, num_layers.saturating_sub(3)]);
    for fields in objects {
        let count = fields.size("num_aux_hidden_states")?;
        if let Some(count) = count.filter(|&count| count != taps.len()) {
            let expected = format!("{}, the number of layers whose inputs it takes", taps.len());
            return Err(fields.wrong("num_aux_hidden_states", &expected, &count.into()));
        }
    }
    Ok(taps)
}
