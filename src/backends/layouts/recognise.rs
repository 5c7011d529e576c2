//! Recognises a model's layout by its tensors.

use std::path::Path;

use repository::ModelConfig;
use repository::proto::DataType;

use super::layout::Layout;
use super::text_names;
use crate::{checkpoint, parameters, python};

/// Names under which configurations ask for the LLM engine.
pub const LLM_BACKENDS: [&str; 5] = ["trireme", "tensorrtllm", "turbomind", "lmdeploy", "sglang"];

/// The layout that a model follows; `None` for one that its own backend serves.
pub fn recognise(config: &ModelConfig, model_dir: &Path, version_dir: &Path) -> Option<Layout> {
    let is_python = config.backend == "python";
    let is_llm = LLM_BACKENDS.contains(&config.backend.as_str());
    if !(is_python || is_llm) || parameters::flag(config, "native") == Ok(Some(false)) {
        return None;
    }
    let takes = |name: &str| config.input.iter().any(|input| input.name == name);
    let gives = |name: &str| config.output.iter().any(|output| output.name == name);
    let has = |name: &str| config.parameters.contains_key(name);
    if takes("QUERY") && gives("INPUT_ID") {
        return Some(Layout::Preprocessing);
    }
    if takes("TOKENS_BATCH") && gives("OUTPUT") {
        return Some(Layout::Postprocessing);
    }
    let has_code = is_python && version_dir.join(python::file_name(config)).is_file();
    if takes("input_ids") && gives("output_ids") {
        // A `model.py` with weights of its own, in a form that only it knows.
        if has_code && !checkpoint::is_named(config) && checkpoint::find(config, model_dir, version_dir).is_err() {
            return None;
        }
        let has_sessions = takes("CORRID") && takes("START");
        return Some(match (has_sessions, gives("log_probs")) {
            (true, _) => Layout::Sessions,
            (false, true) => Layout::FixedBatch,
            (false, false) => Layout::Engine,
        });
    }
    if is_llm && config.input.is_empty() && config.output.is_empty() {
        return Some(Layout::Text);
    }
    let is_text = takes_text(config) && gives_text(config);
    let asks_others = has("tensorrt_llm_model_name") || has("accumulate_tokens") || takes("embedding_bias_words");
    if is_text && takes("text_input") && (asks_others || config.name.ends_with("_bls")) {
        return Some(Layout::Bls);
    }
    let is_lmdeploy = is_lmdeploys(config);
    let is_known = is_text && config.input.iter().all(|input| text_names::input(&input.name).is_some());
    if is_known && (!has_code || is_lmdeploy || checkpoint::find(config, model_dir, version_dir).is_ok()) {
        return Some(Layout::Text);
    }
    is_llm.then_some(Layout::Engine)
}

/// Whether it has the tensors of LMDeploy's Python model.
pub(super) fn is_lmdeploys(config: &ModelConfig) -> bool {
    let takes = |name: &str| config.input.iter().any(|input| input.name == name);
    takes("prompt") && takes("ignore_eos") && config.output.iter().any(|output| output.name == "response")
}

fn takes_text(config: &ModelConfig) -> bool {
    let is_prompt = |name: &str| text_names::PROMPT.contains(&name);
    config.input.iter().any(|input| input.data_type() == DataType::TypeString && is_prompt(&input.name))
}

fn gives_text(config: &ModelConfig) -> bool {
    config.output.iter().any(|output| output.data_type() == DataType::TypeString)
}
