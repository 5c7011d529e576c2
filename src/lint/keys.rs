//! Documentation of every key of every layout.

use backends::layouts::keys::{
    BLS_PARAMETERS, Key, LLM_INPUTS, LLM_OUTPUTS, LLM_PARAMETERS, TEXT_INPUTS, TEXT_OUTPUTS, TEXT_PARAMETERS, Use,
};

use crate::fields::{EVERYWHERE, Kind, use_of};

/// Fields whose meaning depends on the kind of model.
const DEPENDING: [&str; 6] = [
    "max_batch_size",
    "dynamic_batching",
    "sequence_batching",
    "instance_group",
    "default_model_filename",
    "optimization",
];

/// Tables in Markdown, one for each group of keys.
pub(crate) fn markdown() -> String {
    let mut text = String::new();
    text += &section("Fields of every config.pbtxt", &EVERYWHERE);
    let kinds = [("language models", Kind::Llm), ("Python models", Kind::Python), ("others", Kind::Plain)];
    let depending: Vec<(String, Use)> = DEPENDING
        .iter()
        .flat_map(|field| kinds.iter().map(move |(name, kind)| (format!("{field}` ({name})"), use_of(field, *kind))))
        .collect();
    let rows: String = depending.iter().map(|(name, use_)| row(&format!("`{name}"), *use_)).collect();
    text += &(head("Fields whose meaning depends on the model") + &rows + "\n");
    text += &section("Parameters of a language model", LLM_PARAMETERS);
    text += &section("Inputs of a language model that takes token ids", LLM_INPUTS);
    text += &section("Outputs of a language model that gives token ids", LLM_OUTPUTS);
    text += &section("Parameters of preprocessing and postprocessing", TEXT_PARAMETERS);
    text += &section("Inputs of preprocessing and postprocessing", TEXT_INPUTS);
    text += &section("Outputs of preprocessing and postprocessing", TEXT_OUTPUTS);
    text + section("Parameters of tensorrt_llm_bls", BLS_PARAMETERS).trim_end() + "\n"
}

fn head(title: &str) -> String {
    format!("### {title}\n\n| key | | what becomes of it |\n|---|---|---|\n")
}

fn section(title: &str, keys: &[Key]) -> String {
    let rows: String = keys.iter().map(|(name, use_)| row(&format!("`{name}`"), *use_)).collect();
    head(title) + &rows + "\n"
}

fn row(name: &str, use_: Use) -> String {
    let (verdict, why) = match use_ {
        Use::Used(why) => ("used", why),
        Use::Ignored(why) => ("ignored", why),
        Use::Refused(why) => ("refused", why),
    };
    format!("| {name} | {verdict} | {why} |\n")
}
