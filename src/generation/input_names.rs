//! Names of the input tensors by which models take requests for text.

/// Names of the prompt.
pub const PROMPT: [&str; 8] = ["prompt", "text_input", "PROMPT", "INPUT_TEXT", "input_text", "text", "query", "QUERY"];

/// Names of the flag for a stream.
pub const STREAM: [&str; 3] = ["stream", "streaming", "STREAM"];

/// Names of words that end the text.
pub const STOP_WORDS: [&str; 3] = ["stop_words", "stop", "sampling_param_stop"];

/// Names of words that are never generated.
pub const BAD_WORDS: [&str; 1] = ["bad_words"];

/// Names of the flag that excludes the prompt from the output.
pub const EXCLUDE_INPUT: [&str; 2] = ["exclude_input_in_output", "sampling_param_exclude_input_from_output"];

/// Inputs that are passed to the engine: its name, then the names of text models in order of precedence.
pub const NAMES: &[(&str, &[&str])] = &[
    (
        "request_output_len",
        &["max_tokens", "max_new_tokens", "request_output_len", "output_len", "sampling_param_max_tokens"],
    ),
    ("temperature", &["temperature", "TEMPERATURE", "sampling_param_temperature"]),
    ("runtime_top_k", &["top_k", "runtime_top_k", "TOP_K", "sampling_param_top_k"]),
    ("runtime_top_p", &["top_p", "runtime_top_p", "TOP_P", "sampling_param_top_p"]),
    ("runtime_min_p", &["min_p", "runtime_min_p", "sampling_param_min_p"]),
    ("repetition_penalty", &["repetition_penalty"]),
    ("presence_penalty", &["presence_penalty", "sampling_param_presence_penalty"]),
    ("frequency_penalty", &["frequency_penalty", "sampling_param_frequency_penalty"]),
    ("seed", &["seed", "random_seed", "sampling_param_seed"]),
    ("min_tokens", &["min_tokens", "min_length", "min_new_tokens"]),
    ("beam_width", &["beam_width", "num_beams"]),
    ("len_penalty", &["length_penalty", "len_penalty"]),
    ("guided_decoding_guide_type", &["guided_decoding_guide_type"]),
    ("guided_decoding_guide", &["guided_decoding_guide"]),
    ("end_id", &["end_id"]),
    ("return_log_probs", &["return_log_probs", "return_cumulative_logprob"]),
];

/// Names of flags of text models that are not passed to the engine.
const FLAGS: [&str; 2] = ["ignore_eos", "skip_special_tokens"];

/// Fields of OpenAI's protocol that change the answer. Triton's models have other names for them, or lack them (docs/openai.md).
const OPENAI: [&str; 28] = [
    "add_special_tokens",
    "allowed_token_ids",
    "best_of",
    "chat_template_kwargs",
    "echo",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "include_stop_str_in_output",
    "logit_bias",
    "logprobs",
    "messages",
    "n",
    "prompt_logprobs",
    "reasoning_effort",
    "response_format",
    "stop_token_ids",
    "structured_outputs",
    "suffix",
    "thinking_token_budget",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncate_prompt_tokens",
    "use_beam_search",
];

/// Inputs that were renamed between releases of TensorRT-LLM: the earlier name and the later one.
pub const RELEASES: [(&str, &str); 3] =
    [("min_length", "min_tokens"), ("random_seed", "seed"), ("return_kv_cache_reuse_stats", "return_perf_metrics")];

/// The name of an input in another release of TensorRT-LLM.
pub fn other_release(name: &str) -> Option<&'static str> {
    RELEASES.iter().find_map(|&(earlier, later)| match name {
        _ if name == earlier => Some(later),
        _ if name == later => Some(earlier),
        _ => None,
    })
}

/// Whether an input of this name, or a field of OpenAI's protocol, changes the answer of text models.
pub fn changes_text(name: &str) -> bool {
    let lists = [&PROMPT[..], &STREAM, &STOP_WORDS, &BAD_WORDS, &EXCLUDE_INPUT, &FLAGS, &OPENAI];
    lists.iter().any(|names| names.contains(&name)) || NAMES.iter().any(|(_, names)| names.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_releases_lead_to_each_other() {
        assert_eq!(other_release("random_seed"), Some("seed"));
        assert_eq!(other_release("min_tokens"), Some("min_length"));
        assert_eq!(other_release("temperature"), None);
        assert!(
            ["runtime_min_p", "ignore_eos", "stop_words", "stream", "top_logprobs", "n", "functions"]
                .iter()
                .all(|name| changes_text(name))
        );
        assert!(!changes_text("accumulate_tokens") && !changes_text("priority"));
    }
}
