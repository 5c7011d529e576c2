//! Recognises a model's layout by its tensors.

use std::path::Path;

use generation::input_names::PROMPT;
use repository::ModelConfig;
use repository::proto::DataType;

use super::layout::Layout;
use super::text_names;
use crate::{checkpoint, parameters, python};

/// Names of the LLM engine in configurations.
pub const LLM_BACKENDS: [&str; 5] = ["trireme", "tensorrtllm", "turbomind", "lmdeploy", "sglang"];

/// The layout of a model; `None` for a model that its own backend serves.
pub fn recognise(config: &ModelConfig, model_dir: &Path, version_dir: &Path) -> Option<Layout> {
    let is_python = config.backend == "python";
    let is_llm = LLM_BACKENDS.contains(&config.backend.as_str());
    if !(is_python || is_llm) || parameters::flag(config, "native") == Ok(Some(false)) {
        return None;
    }
    let has_input = |name: &str| config.input.iter().any(|input| input.name == name);
    let has_output = |name: &str| config.output.iter().any(|output| output.name == name);
    let has_parameter = |name: &str| config.parameters.contains_key(name);
    if has_input("QUERY") && has_output("INPUT_ID") {
        return Some(Layout::Preprocessing);
    }
    if has_input("TOKENS_BATCH") && has_output("OUTPUT") {
        return Some(Layout::Postprocessing);
    }
    let has_code = is_python && version_dir.join(python::file_name(config)).is_file();
    if has_input("input_ids") && has_output("output_ids") {
        // A `model.py` with weights in a format of its own.
        if has_code && !checkpoint::is_named(config) && checkpoint::find(config, model_dir, version_dir).is_err() {
            return None;
        }
        let has_sessions = has_input("CORRID") && has_input("START");
        return Some(match (has_sessions, has_output("log_probs")) {
            (true, _) => Layout::Sessions,
            (false, true) => Layout::FixedBatch,
            (false, false) => Layout::Engine,
        });
    }
    if is_llm && config.input.is_empty() && config.output.is_empty() {
        return Some(Layout::Text);
    }
    let is_text = has_text_input(config) && has_text_output(config);
    let calls_models = has_parameter("tensorrt_llm_model_name")
        || has_parameter("accumulate_tokens")
        || has_input("embedding_bias_words");
    if is_text && has_input("text_input") && (calls_models || config.name.ends_with("_bls")) {
        return Some(Layout::Bls);
    }
    let is_lmdeploy = is_lmdeploy_model(config);
    let is_known = is_text && config.input.iter().all(|input| text_names::input(&input.name).is_some());
    if is_known && (!has_code || is_lmdeploy || checkpoint::find(config, model_dir, version_dir).is_ok()) {
        return Some(Layout::Text);
    }
    is_llm.then_some(Layout::Engine)
}

/// Whether a model has the tensors of LMDeploy's Python model.
pub(super) fn is_lmdeploy_model(config: &ModelConfig) -> bool {
    let has_input = |name: &str| config.input.iter().any(|input| input.name == name);
    has_input("prompt") && has_input("ignore_eos") && config.output.iter().any(|output| output.name == "response")
}

fn has_text_input(config: &ModelConfig) -> bool {
    let is_prompt = |name: &str| PROMPT.contains(&name);
    config.input.iter().any(|input| input.data_type() == DataType::TypeString && is_prompt(&input.name))
}

fn has_text_output(config: &ModelConfig) -> bool {
    config.output.iter().any(|output| output.data_type() == DataType::TypeString)
}
