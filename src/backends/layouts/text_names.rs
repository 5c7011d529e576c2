//! The names that text models have for what they take, and what becomes of each.

use repository::ModelConfig;
use repository::proto::{DataType as ConfigType, ModelInput, ModelOutput};

use super::engine_config::engine_output;
use super::keys::Use;

/// Names of the prompt.
pub(super) const PROMPT: [&str; 8] =
    ["prompt", "text_input", "PROMPT", "INPUT_TEXT", "input_text", "text", "query", "QUERY"];

/// Names of whether to stream.
pub(super) const STREAM: [&str; 3] = ["stream", "streaming", "STREAM"];

/// Names of words that end the text, and of words that are never generated.
pub(super) const STOP_WORDS: [&str; 3] = ["stop_words", "stop", "sampling_param_stop"];
pub(super) const BAD_WORDS: [&str; 1] = ["bad_words"];

/// Names of whether the prompt is left out of the answer.
pub(super) const EXCLUDE_INPUT: [&str; 2] = ["exclude_input_in_output", "sampling_param_exclude_input_from_output"];

/// Numbers that are handed to the engine as they come: its name, then the names that models use.
pub(super) const NAMES: &[(&str, &[&str])] = &[
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

const OTHERS: &[(&str, Use)] = &[
    ("ignore_eos", Use::Used("generates on behind the token that ends a sequence")),
    ("skip_special_tokens", Use::Used("whether special tokens are left out of the text; yes when not sent")),
    ("return_finish_reason", Use::Used("gives `finish_reason`")),
    ("return_stop_reason", Use::Ignored("which stop word it was is not told")),
    ("pad_id", Use::Ignored("each row is answered by itself")),
    ("sampling_param_best_of", Use::Ignored("one sequence is generated")),
    ("sampling_param_return_perf_metrics", Use::Ignored("figures are read from /metrics")),
    ("image_url", Use::Refused("models read text only")),
    ("lora_id", Use::Refused("adapters are not supported; merge them into the checkpoint")),
    ("lora_name", Use::Refused("adapters are not supported; merge them into the checkpoint")),
    ("lora_path", Use::Refused("adapters are not supported; merge them into the checkpoint")),
    ("lora_ckpt_source", Use::Ignored("adapters are not supported")),
];

/// What becomes of an input; `None` for an unknown one.
pub(super) fn input(name: &str) -> Option<Use> {
    let lists = [
        (&PROMPT[..], "the prompt"),
        (&STREAM[..], "a response for each step"),
        (&STOP_WORDS[..], "ends the text"),
        (&BAD_WORDS[..], "never generated"),
        (&EXCLUDE_INPUT[..], "whether the prompt is left out of the answer"),
    ];
    let listed = lists.into_iter().find(|(names, _)| names.contains(&name)).map(|(_, effect)| Use::Used(effect));
    let number = || NAMES.iter().any(|(_, names)| names.contains(&name)).then_some(Use::Used("of generation"));
    let other = || OTHERS.iter().find(|(other, _)| *other == name).map(|&(_, use_)| use_);
    listed.or_else(number).or_else(other)
}

const NOT_TOLD: Use = Use::Ignored("figures are read from /metrics");

/// Outputs beside the text.
const OUTPUTS: &[(&str, Use)] = &[
    ("finish_reason", Use::Used("`length` or `stop`, in the last response")),
    ("output_log_probs", Use::Used("with `return_log_probs`: one for each token")),
    ("cumulative_logprob", Use::Used("with `return_cumulative_logprob`: their sum")),
    ("stop_reason", Use::Ignored("which stop word it was is not told")),
    ("kv_cache_reused_block", NOT_TOLD),
    ("kv_cache_missed_block", NOT_TOLD),
    ("kv_cache_hit_rate", NOT_TOLD),
    ("kv_cache_alloc_new_blocks", NOT_TOLD),
    ("kv_cache_alloc_total_blocks", NOT_TOLD),
    ("arrival_time_ns", NOT_TOLD),
    ("first_scheduled_time_ns", NOT_TOLD),
    ("first_token_time_ns", NOT_TOLD),
    ("last_token_time_ns", NOT_TOLD),
    ("acceptance_rate", NOT_TOLD),
    ("total_accepted_draft_tokens", NOT_TOLD),
    ("total_draft_tokens", NOT_TOLD),
];

/// What becomes of an output; `None` for an unknown one.
pub(super) fn output(output: &ModelOutput) -> Option<Use> {
    let listed = OUTPUTS.iter().find(|(name, _)| *name == output.name).map(|&(_, use_)| use_);
    let text = || (output.data_type() == ConfigType::TypeString).then_some(Use::Used("the text"));
    listed.or_else(text)
}

/// What every text model takes, whether its configuration declares it or not: what clients of OpenAI's interface may ask.
const ALWAYS: [(&str, ConfigType); 6] = [
    ("repetition_penalty", ConfigType::TypeFp32),
    ("presence_penalty", ConfigType::TypeFp32),
    ("frequency_penalty", ConfigType::TypeFp32),
    ("seed", ConfigType::TypeUint64),
    ("min_tokens", ConfigType::TypeInt32),
    ("return_log_probs", ConfigType::TypeBool),
];

/// Those of them that a configuration has under no name.
pub(super) fn missing_inputs(config: &ModelConfig) -> Vec<ModelInput> {
    let is_declared = |names: &[&str]| config.input.iter().any(|input| names.contains(&input.name.as_str()));
    let has = |name: &str| NAMES.iter().any(|(_, names)| names.contains(&name) && is_declared(names));
    ALWAYS.iter().filter(|(name, _)| !has(name)).map(|&(name, data_type)| declared(name, data_type, true, 1)).collect()
}

fn declared(name: &str, data_type: ConfigType, optional: bool, dim: i64) -> ModelInput {
    let mut input = ModelInput { name: name.to_owned(), dims: vec![dim], optional, ..ModelInput::default() };
    input.set_data_type(data_type);
    input
}

/// What a checkpoint without a configuration takes.
pub(super) fn default_inputs() -> Vec<ModelInput> {
    let optional = |name: &str, data_type| declared(name, data_type, true, 1);
    let words = |name: &str| declared(name, ConfigType::TypeString, true, -1);
    vec![
        declared("text_input", ConfigType::TypeString, false, 1),
        optional("max_tokens", ConfigType::TypeInt32),
        optional("stream", ConfigType::TypeBool),
        optional("temperature", ConfigType::TypeFp32),
        optional("top_k", ConfigType::TypeInt32),
        optional("top_p", ConfigType::TypeFp32),
        optional("beam_width", ConfigType::TypeInt32),
        optional("end_id", ConfigType::TypeInt32),
        optional("pad_id", ConfigType::TypeInt32),
        optional("exclude_input_in_output", ConfigType::TypeBool),
        optional("ignore_eos", ConfigType::TypeBool),
        words("stop_words"),
        words("bad_words"),
    ]
}

/// An output of text.
pub(super) fn text_output(name: &str) -> ModelOutput {
    engine_output(name, ConfigType::TypeString)
}
