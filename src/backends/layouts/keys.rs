//! Every parameter and tensor of the published layouts, and what becomes of it here. The log, `trireme lint` and the
//! documentation all speak from these tables.

use Use::{Ignored, Refused, Used};

/// What becomes of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Its effect.
    Used(&'static str),
    /// Why it has none.
    Ignored(&'static str),
    /// Why a request with it is refused: without it the answer would be another one.
    Refused(&'static str),
}

/// A key and what becomes of it.
pub type Key = (&'static str, Use);

const NO_ENCODER: Use = Refused("models have a decoder only");
const NO_DECODER_PROMPT: Use = Ignored("it is for models with an encoder; the prompt is `input_ids`");
const NO_IMAGES: Use = Refused("models read text only");
const NO_LORA: Use = Refused("adapters are not supported; merge them into the checkpoint");
const NO_DRAFT: Use = Ignored("there is no draft model; answers are the same without one");
const SCHEDULED_HERE: Use = Ignored("the scheduler decides this from step to step");
const NO_LORA_CACHE: Use = Ignored("there are no adapters to cache");
const NO_HOST_CACHE: Use = Ignored("KV blocks stay on the device");
const NO_MPI_PLACES: Use = Ignored("`--world_size` and the launcher place ranks");
const EVERY_STEP: Use = Ignored("this is looked at in every step");
const CLASS_OF_KERNEL: Use = Ignored("kernels are chosen by shape");
const NO_PROMPT_TUNING: Use = Ignored("prompt tuning is not supported");
const TEXT_ONLY: Use = Ignored("models read text only");
const KEEP_ALL: Use = Ignored("the prefix cache drops the least recently used block first");

/// Parameters of a language model.
pub const LLM_PARAMETERS: &[Key] = &[
    ("gpt_model_path", Used("directory of the Hugging Face checkpoint; the version directory when not set")),
    ("engine_dir", Used("the same, as the Python repositories call it")),
    ("model_dir", Used("the same, as the turbomind backend calls it")),
    ("gpt_model_type", Used("`V1` serves one batch after another; anything else batches in flight")),
    ("tp", Used("ranks that share a replica of the model; all ranks of the world when not set")),
    (
        "replicas",
        Used(
            "copies of the model, each on `tp` x `pp` ranks, behind one queue; as many as the world has ranks for when not set",
        ),
    ),
    ("pp", Used("pipeline stages; one when not set")),
    ("pipeline_parallelism", Used("the same under another name")),
    ("tensor_para_size", Used("the same, as TurboMind calls it")),
    ("max_tokens_in_paged_kv_cache", Used("tokens that KV blocks hold")),
    ("kv_cache_free_gpu_mem_fraction", Used("share of free memory that KV blocks take")),
    ("cache_max_entry_count", Used("the same, as TurboMind calls it")),
    ("batch_scheduler_policy", Used("`max_utilization` or `guaranteed_no_evict`")),
    ("enable_kv_cache_reuse", Used("whether equal beginnings of prompts share KV blocks; yes when not set")),
    ("exclude_input_in_output", Used("whether `output_ids` leave the prompt out when the request does not say")),
    (
        "check_input_ids",
        Used("`true` refuses prompts with ids beyond the vocabulary; else they are taken modulo its size"),
    ),
    ("max_num_tokens", Used("most tokens of a step")),
    ("max_mixed_prefill_tokens", Used("most prompt tokens of a step that also decodes: bounds the gap between tokens")),
    ("max_sequence_len", Used("longest sequence; the checkpoint's when not set")),
    (
        "weight_only_precision",
        Used("`int8` or `int4`: how a CPU holds weights; as the checkpoint has them when not set"),
    ),
    ("tokens_per_block", Used("tokens of a KV block")),
    ("tokenizer_dir", Used("directory of the tokenizer; the checkpoint's when not set")),
    ("chat_format", Used("how the model writes reasoning and tool calls; as `--chat-format` when not set")),
    ("native", Used("`false` runs the model.py that lies there instead of standing in for it")),
    ("max_beam_width", Used("widest beam search that a request may ask for")),
    ("enable_chunked_context", Ignored("long prompts are always prefilled in chunks")),
    ("FORCE_CPU_ONLY_INPUT_TENSORS", Ignored("tensors of requests always are in host memory")),
    ("encoder_model_path", Ignored("models have a decoder only")),
    ("max_attention_window_size", Ignored("the checkpoint's own window counts")),
    ("max_kv_cache_length", Ignored("the checkpoint's own window counts")),
    ("sink_token_length", Ignored("there are no attention sinks")),
    ("cross_kv_cache_fraction", Ignored("models have a decoder only")),
    ("kv_cache_host_memory_bytes", NO_HOST_CACHE),
    ("kv_cache_onboard_blocks", NO_HOST_CACHE),
    ("max_num_sequences", Ignored("`max_batch_size` bounds the sequences that run at once")),
    ("enable_trt_overlap", SCHEDULED_HERE),
    ("cancellation_check_period_ms", EVERY_STEP),
    ("stats_check_period_ms", EVERY_STEP),
    ("iter_stats_max_iterations", Ignored("figures are read from /metrics")),
    ("request_stats_max_iterations", Ignored("figures are read from /metrics")),
    ("normalize_log_probs", Ignored("log probabilities are always those of the unmodified logits")),
    ("gpu_device_ids", NO_MPI_PLACES),
    ("participant_ids", NO_MPI_PLACES),
    ("num_nodes", NO_MPI_PLACES),
    ("worker_path", NO_MPI_PLACES),
    ("executor_worker_path", NO_MPI_PLACES),
    ("lora_cache_optimal_adapter_size", NO_LORA_CACHE),
    ("lora_cache_max_adapter_size", NO_LORA_CACHE),
    ("lora_cache_gpu_memory_fraction", NO_LORA_CACHE),
    ("lora_cache_host_memory_bytes", NO_LORA_CACHE),
    ("lora_prefetch_dir", NO_LORA_CACHE),
    ("decoding_mode", Ignored("each request says how it decodes")),
    ("medusa_choices", NO_DRAFT),
    ("eagle_choices", NO_DRAFT),
    ("speculative_decoding_fast_logits", NO_DRAFT),
    ("lookahead_window_size", NO_DRAFT),
    ("lookahead_ngram_size", NO_DRAFT),
    ("lookahead_verification_set_size", NO_DRAFT),
    ("gpu_weights_percent", Ignored("all weights stay on the device")),
    ("enable_context_fmha_fp32_acc", CLASS_OF_KERNEL),
    ("multi_block_mode", CLASS_OF_KERNEL),
    ("cuda_graph_mode", CLASS_OF_KERNEL),
    ("cuda_graph_cache_size", CLASS_OF_KERNEL),
    ("guided_decoding_backend", Ignored("every model is constrained by `llguidance`")),
    ("xgrammar_tokenizer_info_path", Ignored("the checkpoint's tokenizer is read")),
    ("pipeline_para_size", Ignored("`--world_size` and the launcher place ranks")),
    ("data_type", Ignored("the checkpoint's own type counts")),
    ("model_type", Ignored("the checkpoint's config.json names its architecture")),
    ("model_name", Ignored("the checkpoint's config.json names its architecture")),
    ("enable_custom_all_reduce", CLASS_OF_KERNEL),
    ("prompt_lookup_num_tokens", Used("tokens that prompt look-up guesses in one step; none when not set")),
    ("max_output_length", Used("tokens to generate when the request does not say")),
    ("max_output_tokens", Used("tokens to generate when the request does not say")),
    ("max_new_tokens", Used("tokens to generate when the request does not say")),
    ("huggingface_model", Used("directory of the Hugging Face checkpoint, where it is one")),
    ("model_path", Used("directory of the Hugging Face checkpoint, where it is one")),
];

/// Inputs of a language model that takes token ids.
pub const LLM_INPUTS: &[Key] = &[
    ("input_ids", Used("the prompt")),
    ("input_lengths", Used("tokens of the prompt, padding aside")),
    ("request_output_len", Used("most tokens to generate")),
    ("num_return_sequences", Used("sequences to generate")),
    (
        "end_id",
        Used("token that ends a sequence; the checkpoint's when not sent, none when the vocabulary does not have it"),
    ),
    ("pad_id", Used("fills rows that are shorter than others")),
    ("stop_words_list", Used("ends a sequence")),
    ("bad_words_list", Used("never generated")),
    ("embedding_bias", Used("added to the logits")),
    ("beam_width", Used("beams of the search")),
    ("temperature", Used("of sampling, where top-k or top-p asks for it")),
    ("runtime_top_k", Used("of sampling")),
    ("runtime_top_p", Used("of sampling")),
    ("runtime_min_p", Used("of sampling")),
    ("min_p", Used("the same under its other name")),
    ("runtime_top_p_min", Used("of sampling")),
    ("runtime_top_p_decay", Used("of sampling")),
    ("runtime_top_p_reset_ids", Used("of sampling")),
    ("top_p_min", Used("of sampling")),
    ("top_p_decay", Used("of sampling")),
    ("top_p_reset_ids", Used("of sampling")),
    ("len_penalty", Used("of beam search")),
    ("early_stopping", Used("of beam search")),
    ("beam_search_diversity_rate", Used("of beam search")),
    ("repetition_penalty", Used("of sampling")),
    ("presence_penalty", Used("of sampling")),
    ("frequency_penalty", Used("of sampling")),
    ("min_length", Used("fewest tokens to generate")),
    ("min_tokens", Used("the same under its later name")),
    ("random_seed", Used("of sampling")),
    ("seed", Used("the same under its later name")),
    ("return_log_probs", Used("gives `cum_log_probs` and `output_log_probs`")),
    ("output_log_probs", Used("gives `log_probs`")),
    ("is_return_log_probs", Used("gives `cum_log_probs` and `output_log_probs`")),
    ("return_context_logits", Used("gives `context_logits`")),
    ("return_generation_logits", Used("gives `generation_logits`")),
    ("return_perf_metrics", Used("gives times and KV block counts")),
    ("return_kv_cache_reuse_stats", Used("the same under its earlier name")),
    ("return_num_input_tokens", Used("gives `num_input_tokens`")),
    ("return_num_output_tokens", Used("gives `num_output_tokens`")),
    ("exclude_input_in_output", Used("leaves the prompt out of `output_ids`")),
    ("stop", Used("ends the running request of the same id")),
    ("streaming", Used("a response for each step, for decoupled models")),
    ("START", Used("begins a session")),
    ("END", Used("ends a session with this request")),
    ("STOP", Used("ends what the session runs")),
    ("CORRID", Used("the session's number")),
    ("step", Used("tokens of the session's history to keep; all of it when negative")),
    ("session_len", Used("most tokens of a session")),
    ("start_id", Ignored("prompts arrive with their begin token")),
    ("draft_acceptance_threshold", NO_DRAFT),
    ("draft_input_ids", NO_DRAFT),
    ("draft_logits", NO_DRAFT),
    ("lookahead_window_size", NO_DRAFT),
    ("lookahead_ngram_size", NO_DRAFT),
    ("lookahead_verification_set_size", NO_DRAFT),
    ("prompt_vocab_size", Ignored("it belongs to `prompt_embedding_table`")),
    ("prompt_table_extra_ids", Ignored("it belongs to `prompt_embedding_table`")),
    ("prompt_embedding_table", Refused("prompt tuning is not supported")),
    ("prompt_learning_task_name_ids", NO_PROMPT_TUNING),
    ("input_embeddings", NO_IMAGES),
    ("input_embedding_ranges", NO_IMAGES),
    ("encoder_input_features", NO_ENCODER),
    ("encoder_output_lengths", NO_ENCODER),
    ("decoder_input_ids", NO_DECODER_PROMPT),
    ("decoder_input_lengths", NO_DECODER_PROMPT),
    ("cross_attention_mask", NO_ENCODER),
    ("skip_cross_attn_blocks", NO_ENCODER),
    ("mrope_rotary_cos_sin", NO_IMAGES),
    ("mrope_position_deltas", NO_IMAGES),
    ("lora_task_id", NO_LORA),
    ("lora_weights", NO_LORA),
    ("lora_config", NO_LORA),
    ("context_phase_params", Refused("prefill and decode run on the same ranks")),
    ("retention_token_range_starts", KEEP_ALL),
    ("retention_token_range_ends", KEEP_ALL),
    ("retention_token_range_priorities", KEEP_ALL),
    ("retention_token_range_durations_ms", KEEP_ALL),
    ("retention_decode_priority", KEEP_ALL),
    ("retention_decode_duration_ms", KEEP_ALL),
    (
        "guided_decoding_guide_type",
        Used("what the text must be: `json`, `json_schema`, `regex`, `ebnf_grammar` or `structural_tag`"),
    ),
    ("guided_decoding_guide", Used("the schema, expression, grammar or structural tag")),
];

/// Outputs of a language model that gives token ids.
pub const LLM_OUTPUTS: &[Key] = &[
    ("output_ids", Used("the tokens, behind the prompt unless that is left out")),
    ("sequence_length", Used("tokens of each row of `output_ids`")),
    ("cum_log_probs", Used("with `return_log_probs`: their sum")),
    ("output_log_probs", Used("with `return_log_probs`: one for each token")),
    ("log_probs", Used("with `output_log_probs`: one for each token")),
    ("context_logits", Used("with `return_context_logits`")),
    ("generation_logits", Used("with `return_generation_logits`")),
    ("batch_index", Used("the row of the request, which is 0")),
    ("sequence_index", Used("which of the request's sequences it is")),
    ("sequence_end", Used("whether the sequence ends, where a request has several")),
    ("num_input_tokens", Used("with `return_num_input_tokens`")),
    ("num_output_tokens", Used("with `return_num_output_tokens`")),
    ("kv_cache_alloc_new_blocks", Used("with `return_perf_metrics`")),
    ("kv_cache_reused_blocks", Used("with `return_perf_metrics`")),
    ("kv_cache_alloc_total_blocks", Used("with `return_perf_metrics`")),
    ("arrival_time_ns", Used("with `return_perf_metrics`")),
    ("first_scheduled_time_ns", Used("with `return_perf_metrics`")),
    ("first_token_time_ns", Used("with `return_perf_metrics`")),
    ("last_token_time_ns", Used("with `return_perf_metrics`")),
    ("acceptance_rate", Used("with `return_perf_metrics`, of prompt look-up")),
    ("total_accepted_draft_tokens", Used("with `return_perf_metrics`, of prompt look-up")),
    ("total_draft_tokens", Used("with `return_perf_metrics`, of prompt look-up")),
    ("context_phase_params", Ignored("prefill and decode run on the same ranks")),
];

/// Parameters of `preprocessing` and `postprocessing`.
pub const TEXT_PARAMETERS: &[Key] = &[
    ("tokenizer_dir", Used("directory of the tokenizer; the language model's when not set")),
    ("tokenizer_path", Used("file of the tokenizer, seen from the version directory")),
    ("tokenizer_type", Used("`auto`, `llama` or `t5`: which files make the tokenizer, and by whose rules")),
    ("add_special_tokens", Used("whether prompts get the begin token; yes when not set")),
    ("skip_special_tokens", Used("whether special tokens are left out of the text; yes when not set")),
    ("native", Used("`false` runs the model.py that lies there instead of standing in for it")),
    ("gpt_model_path", Ignored("it serves images only")),
    ("engine_dir", Ignored("it serves images only")),
    ("visual_model_path", TEXT_ONLY),
    ("multimodal_model_path", TEXT_ONLY),
    ("hf_model_path", TEXT_ONLY),
    ("max_num_images", TEXT_ONLY),
];

/// Inputs of `preprocessing` and `postprocessing`.
pub const TEXT_INPUTS: &[Key] = &[
    ("QUERY", Used("the prompt")),
    ("DECODER_QUERY", Used("text for the decoder")),
    ("REQUEST_OUTPUT_LEN", Used("handed on")),
    ("BAD_WORDS_DICT", Used("words that are never generated")),
    ("STOP_WORDS_DICT", Used("words that end the text")),
    ("EMBEDDING_BIAS_WORDS", Used("words with a weight")),
    ("EMBEDDING_BIAS_WEIGHTS", Used("their weights")),
    ("END_ID", Used("handed on")),
    ("PAD_ID", Used("fills rows that are shorter than others")),
    ("PROMPT_TABLE_EXTRA_ID", Used("handed on")),
    ("PROMPT_EMBEDDING_TABLE", NO_IMAGES),
    ("IMAGE", NO_IMAGES),
    ("IMAGE_BYTES", NO_IMAGES),
    ("IMAGE_URL", NO_IMAGES),
    ("IMAGES", NO_IMAGES),
    ("VIDEO_BYTES", NO_IMAGES),
    ("TOKENS_BATCH", Used("token ids")),
    ("SEQUENCE_LENGTH", Used("tokens of each row")),
    ("sequence_length", Used("tokens that were told before")),
    ("skip_special_tokens", Used("whether special tokens are left out of the text")),
    ("SEQUENCE_INDEX", Used("which sequence the tokens belong to")),
    ("SEQUENCE_END", Used("whether the sequence ends")),
    ("CUM_LOG_PROBS", Used("handed on")),
    ("OUTPUT_LOG_PROBS", Used("handed on")),
    ("CONTEXT_LOGITS", Used("handed on")),
    ("GENERATION_LOGITS", Used("handed on")),
    ("BATCH_INDEX", Used("handed on")),
];

/// Outputs of `preprocessing` and `postprocessing`.
pub const TEXT_OUTPUTS: &[Key] = &[
    ("INPUT_ID", Used("the prompt's tokens")),
    ("REQUEST_INPUT_LEN", Used("how many they are")),
    ("DECODER_INPUT_ID", Used("tokens of the text for the decoder")),
    ("REQUEST_DECODER_INPUT_LEN", Used("how many they are")),
    ("REQUEST_OUTPUT_LEN", Used("handed on")),
    ("BAD_WORDS_IDS", Used("tokens of words that are never generated")),
    ("STOP_WORDS_IDS", Used("tokens of words that end the text")),
    ("EMBEDDING_BIAS", Used("weights of tokens")),
    ("OUT_END_ID", Used("the request's, else the tokenizer's")),
    ("OUT_PAD_ID", Used("the request's, else the tokenizer's")),
    ("OUT_PROMPT_TABLE_EXTRA_IDS", Used("handed on")),
    ("OUT_PROMPT_EMBEDDING_TABLE", NO_PROMPT_TUNING),
    ("PROMPT_LEARNING_TASK_NAME_IDS", NO_PROMPT_TUNING),
    ("PIXEL_VALUES", TEXT_ONLY),
    ("ASPECT_RATIO_IDS", TEXT_ONLY),
    ("ASPECT_RATIO_MASK", TEXT_ONLY),
    ("CROSS_ATTENTION_MASK", TEXT_ONLY),
    ("IMAGE_SIZES", TEXT_ONLY),
    ("IS_VIDEO_INPUT", TEXT_ONLY),
    ("ATTENTION_MASK", TEXT_ONLY),
    ("IMAGE_GRID_THW", TEXT_ONLY),
    ("VISION_INPUT_ID", TEXT_ONLY),
    ("OUTPUT", Used("the text")),
    ("OUT_CUM_LOG_PROBS", Used("handed on")),
    ("OUT_OUTPUT_LOG_PROBS", Used("handed on")),
    ("OUT_CONTEXT_LOGITS", Used("handed on")),
    ("OUT_GENERATION_LOGITS", Used("handed on")),
    ("OUT_BATCH_INDEX", Used("handed on")),
];

/// Parameters of `tensorrt_llm_bls`.
pub const BLS_PARAMETERS: &[Key] = &[
    ("accumulate_tokens", Used("each response of a stream holds the whole text so far")),
    ("tensorrt_llm_model_name", Used("the language model to ask; `tensorrt_llm` when not set")),
    ("native", Used("`false` runs the model.py that lies there instead of standing in for it")),
    ("tensorrt_llm_draft_model_name", NO_DRAFT),
    ("multimodal_encoders_name", TEXT_ONLY),
];

/// What a table says of a key; `None` for one that no published layout has.
pub fn find(table: &[Key], name: &str) -> Option<Use> {
    table.iter().find(|(key, _)| *key == name).map(|&(_, use_)| use_)
}
