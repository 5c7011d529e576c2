//! Parameters and tensors of the published layouts, with their effects here. The log, `trireme lint` and the documentation use these
//! tables.

use Use::{Ignored, Refused, Used};

/// The effect of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It is supported. The text is its effect.
    Used(&'static str),
    /// It has no effect, for this reason.
    Ignored(&'static str),
    /// Requests with it are refused for this reason, because the output would differ without it.
    Refused(&'static str),
}

/// A key with its effect.
pub type Key = (&'static str, Use);

const NO_ENCODER: Use = Refused("models have a decoder only");
const NO_DECODER_PROMPT: Use = Ignored("it is for models with an encoder; the prompt is `input_ids`");
const NO_IMAGES: Use = Refused("models read text only");
const NO_DRAFT: Use = Ignored(
    "the output is the same without; `draft_model_path`, `eagle3_path`, `mtp_num_tokens` and `prompt_lookup_num_tokens` give drafts",
);
const SCHEDULED_HERE: Use = Ignored("the scheduler decides this in each step");
const NO_LORA_CACHE: Use = Ignored("`max_loras` and `lora_memory_bytes` bound the adapters");
const NO_MPI_PLACES: Use = Ignored("`--world_size` and the launcher place ranks");
const EVERY_STEP: Use = Ignored("this is checked in every step");
const KERNEL_CHOICE: Use = Ignored("kernels are chosen by shape");
const NO_PROMPT_TUNING: Use = Ignored("prompt tuning is not supported");
const TEXT_ONLY: Use = Ignored("models read text only");
const KEEP_ALL: Use = Ignored("the prefix cache drops the least recently used block first");

/// Parameters of a language model.
pub const LLM_PARAMETERS: &[Key] = &[
    ("gpt_model_path", Used("directory of the Hugging Face checkpoint; default: the version directory")),
    ("engine_dir", Used("the same, in Python repositories")),
    ("model_dir", Used("the same, in TurboMind's configurations")),
    ("gpt_model_type", Used("`V1` runs one batch after another; any other value batches in flight")),
    ("tp", Used("tensor parallel size; default: all ranks of the world")),
    (
        "replicas",
        Used(
            "replicas of the model, each on `tp` x `pp` ranks, behind one queue; default: as many as fit into the world",
        ),
    ),
    ("pp", Used("pipeline stages; default: 1")),
    ("pipeline_parallelism", Used("the same, another name")),
    ("ep", Used("parts of the `tp` workers that have different experts; default: 1, columns of every expert on all")),
    ("tensor_para_size", Used("the same, in TurboMind's configurations")),
    ("max_tokens_in_paged_kv_cache", Used("size of the KV cache in tokens")),
    ("kv_cache_free_gpu_mem_fraction", Used("share of free memory for KV blocks")),
    ("cache_max_entry_count", Used("the same, in TurboMind's configurations")),
    ("kv_cache_dtype", Used("type of keys and values: `auto`, `bf16`, `fp8` or `int8`; default: `--kv-cache-dtype`")),
    ("kv_cache_quant_algo", Used("the same as `kv_cache_dtype`, TensorRT-LLM's name: `FP8` or `INT8`")),
    (
        "kv_cache_host_memory_bytes",
        Used(
            "host memory of each worker for KV blocks that are evicted from the device; default: `--kv-cache-host-memory`",
        ),
    ),
    (
        "kv_cache_disk_bytes",
        Used("file of each worker for KV blocks that leave host memory; default: `--kv-cache-disk`"),
    ),
    ("batch_scheduler_policy", Used("`max_utilization` or `guaranteed_no_evict`")),
    ("enable_kv_cache_reuse", Used("whether prompts with a common prefix share KV blocks; default: yes")),
    (
        "exclude_input_in_output",
        Used("whether `output_ids` exclude the prompt, unless the request has this input; default: no"),
    ),
    (
        "check_input_ids",
        Used("`true` refuses prompts with ids outside of the vocabulary; otherwise they are taken modulo its size"),
    ),
    ("max_num_tokens", Used("maximum number of tokens in a step")),
    (
        "max_inter_token_ms",
        Used(
            "longest time between two tokens of a stream while prompts are computed, in milliseconds; `50,1:20` has another bound for priority level 1",
        ),
    ),
    (
        "max_sequence_len",
        Used("maximum length of a sequence, at most the positions of the checkpoint; default: all of them"),
    ),
    (
        "quantization",
        Used(
            "how linear layers are quantized at load: `fp8`, `int8`, `int4` or `none`; default: `--weight-only-precision`",
        ),
    ),
    (
        "batch_invariant",
        Used(
            "`true`: tokens of a request never depend on what runs beside it, on GPUs too; default: `--batch-invariant`",
        ),
    ),
    ("weight_only_precision", Used("the same as `quantization`, TensorRT-LLM's name")),
    ("use_weight_only", Used("`true`: `int8`, if no precision is named; `false`: none")),
    ("tokens_per_block", Used("tokens of a KV block")),
    ("tokenizer_dir", Used("directory of the tokenizer; default: the checkpoint's")),
    ("chat_format", Used("format of reasoning and tool calls; default: `--chat-format`")),
    ("native", Used("`false` runs the model.py of the model; otherwise the native implementation replaces it")),
    ("max_beam_width", Used("maximum beam width of a request")),
    ("enable_chunked_context", Ignored("long prompts are always prefilled in chunks")),
    ("FORCE_CPU_ONLY_INPUT_TENSORS", Ignored("tensors of requests are always in host memory")),
    ("encoder_model_path", Ignored("models have a decoder only")),
    ("max_attention_window_size", Ignored("the checkpoint defines the window")),
    ("max_kv_cache_length", Ignored("the checkpoint defines the window")),
    ("sink_token_length", Ignored("there are no attention sinks")),
    ("cross_kv_cache_fraction", Ignored("models have a decoder only")),
    (
        "kv_cache_onboard_blocks",
        Ignored("blocks of `kv_cache_host_memory_bytes` always return to the device before they are used"),
    ),
    ("max_num_sequences", Ignored("`max_batch_size` bounds the number of running sequences")),
    ("enable_trt_overlap", SCHEDULED_HERE),
    ("cancellation_check_period_ms", EVERY_STEP),
    ("stats_check_period_ms", EVERY_STEP),
    ("iter_stats_max_iterations", Ignored("/metrics has these statistics")),
    ("request_stats_max_iterations", Ignored("/metrics has these statistics")),
    ("normalize_log_probs", Ignored("log-probabilities are always those of the unmodified logits")),
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
    ("decoding_mode", Ignored("each request selects its decoding mode")),
    ("medusa_choices", NO_DRAFT),
    ("eagle_choices", NO_DRAFT),
    ("speculative_decoding_fast_logits", NO_DRAFT),
    ("lookahead_window_size", NO_DRAFT),
    ("lookahead_ngram_size", NO_DRAFT),
    ("lookahead_verification_set_size", NO_DRAFT),
    ("gpu_weights_percent", Ignored("all weights stay on the device")),
    ("enable_context_fmha_fp32_acc", KERNEL_CHOICE),
    ("multi_block_mode", KERNEL_CHOICE),
    ("cuda_graph_mode", KERNEL_CHOICE),
    ("cuda_graph_cache_size", KERNEL_CHOICE),
    ("guided_decoding_backend", Ignored("`llguidance` constrains all models")),
    ("xgrammar_tokenizer_info_path", Ignored("the checkpoint's tokenizer is read")),
    ("pipeline_para_size", Ignored("`--world_size` and the launcher place ranks")),
    ("data_type", Ignored("the checkpoint defines the type")),
    ("model_type", Ignored("the checkpoint's config.json names its architecture")),
    ("model_name", Ignored("the checkpoint's config.json names its architecture")),
    ("enable_custom_all_reduce", KERNEL_CHOICE),
    ("prompt_lookup_num_tokens", Used("draft tokens of prompt look-up in one step; default: 0")),
    ("mtp_num_tokens", Used("draft tokens of the checkpoint's MTP head in one step; default: 0")),
    ("draft_model_num_tokens", Used("draft tokens of the draft model in one step; default: 0")),
    (
        "draft_model_path",
        Used("directory of the checkpoint of a smaller model with the same tokenizer, which guesses drafts"),
    ),
    ("eagle3_num_tokens", Used("draft tokens of the EAGLE-3 head in one step; default: 0")),
    ("eagle3_path", Used("directory of the checkpoint of an EAGLE-3 head for this model, which guesses drafts")),
    (
        "max_loras",
        Used("slots for adapters (LoRA) on the workers; default: 4 if `lora_modules` names some, otherwise 0"),
    ),
    ("max_lora_rank", Used("largest rank of an adapter, at most 64; default: 16")),
    ("lora_modules", Used("adapters that are loaded with the model: `NAME=PATH`, separated by commas")),
    ("lora_memory_bytes", Used("host memory for the weights of adapters; default: 4 GiB")),
    ("max_output_length", Used("default number of tokens to generate")),
    ("max_output_tokens", Used("default number of tokens to generate")),
    ("max_new_tokens", Used("default number of tokens to generate")),
    ("huggingface_model", Used("directory of the Hugging Face checkpoint, if it is a directory")),
    ("model_path", Used("directory of the Hugging Face checkpoint, if it is a directory")),
];

/// Inputs of a language model with token ids.
pub const LLM_INPUTS: &[Key] = &[
    ("input_ids", Used("the prompt")),
    ("input_lengths", Used("number of prompt tokens without padding")),
    ("request_output_len", Used("maximum number of tokens to generate")),
    ("num_return_sequences", Used("number of sequences to generate")),
    (
        "end_id",
        Used("token that ends a sequence; default: the checkpoint's; an id outside of the vocabulary means none"),
    ),
    ("pad_id", Used("pads shorter rows")),
    ("stop_words_list", Used("words that end a sequence")),
    ("bad_words_list", Used("words that are never generated")),
    ("embedding_bias", Used("added to the logits")),
    ("beam_width", Used("beam width of a beam search")),
    ("temperature", Used("of sampling, with a top-k or a top-p")),
    ("runtime_top_k", Used("of sampling")),
    ("runtime_top_p", Used("of sampling")),
    ("runtime_min_p", Used("of sampling")),
    ("min_p", Used("the same, another name")),
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
    ("min_length", Used("minimum number of tokens to generate")),
    ("min_tokens", Used("the same, name of later releases")),
    ("random_seed", Used("of sampling")),
    ("seed", Used("the same, name of later releases")),
    ("return_log_probs", Used("returns `cum_log_probs` and `output_log_probs`")),
    ("output_log_probs", Used("returns `log_probs`")),
    ("is_return_log_probs", Used("returns `cum_log_probs` and `output_log_probs`")),
    ("return_context_logits", Used("returns `context_logits`")),
    ("return_generation_logits", Used("returns `generation_logits`")),
    ("return_perf_metrics", Used("returns times and numbers of KV blocks")),
    ("return_kv_cache_reuse_stats", Used("the same, name of earlier releases")),
    ("return_num_input_tokens", Used("returns `num_input_tokens`")),
    ("return_num_output_tokens", Used("returns `num_output_tokens`")),
    ("exclude_input_in_output", Used("excludes the prompt from `output_ids`")),
    ("stop", Used("stops the running request with the same id")),
    ("streaming", Used("sends a response for each step, from decoupled models")),
    ("START", Used("begins a session")),
    ("END", Used("ends a session with this request")),
    ("STOP", Used("cancels the running request of the session")),
    ("CORRID", Used("id of the session")),
    ("step", Used("number of tokens of the session's history to keep; a negative number keeps all")),
    ("session_len", Used("maximum number of tokens of a session")),
    ("start_id", Ignored("prompts include their begin token")),
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
    (
        "lora_task_id",
        Used("number of the request's adapter (LoRA), whose weights came with this or an earlier request"),
    ),
    ("lora_weights", Used("weights of the adapter, a row for each of `lora_config`")),
    ("lora_config", Used("module, layer and rank of each row of `lora_weights`")),
    ("context_phase_params", Refused("prefill and decode run on the same ranks")),
    ("retention_token_range_starts", KEEP_ALL),
    ("retention_token_range_ends", KEEP_ALL),
    ("retention_token_range_priorities", KEEP_ALL),
    ("retention_token_range_durations_ms", KEEP_ALL),
    ("retention_decode_priority", KEEP_ALL),
    ("retention_decode_duration_ms", KEEP_ALL),
    (
        "guided_decoding_guide_type",
        Used("kind of constraint: `json`, `json_schema`, `regex`, `ebnf_grammar` or `structural_tag`"),
    ),
    ("guided_decoding_guide", Used("the schema, regular expression, grammar or structural tag")),
];

/// Outputs of a language model with token ids.
pub const LLM_OUTPUTS: &[Key] = &[
    ("output_ids", Used("the prompt, unless it is excluded, and the generated tokens")),
    ("sequence_length", Used("number of tokens of each row of `output_ids`")),
    ("cum_log_probs", Used("with `return_log_probs`: the sum of log-probabilities")),
    ("output_log_probs", Used("with `return_log_probs`: the log-probability of each token")),
    ("log_probs", Used("with `output_log_probs`: the log-probability of each token")),
    ("context_logits", Used("with `return_context_logits`")),
    ("generation_logits", Used("with `return_generation_logits`")),
    ("batch_index", Used("index of the row in the batch")),
    ("sequence_index", Used("index of the sequence in the request")),
    ("sequence_end", Used("whether the sequence ends, for requests of several sequences")),
    ("num_input_tokens", Used("with `return_num_input_tokens`")),
    ("num_output_tokens", Used("with `return_num_output_tokens`")),
    ("kv_cache_alloc_new_blocks", Used("with `return_perf_metrics`")),
    ("kv_cache_reused_blocks", Used("with `return_perf_metrics`")),
    ("kv_cache_alloc_total_blocks", Used("with `return_perf_metrics`")),
    ("arrival_time_ns", Used("with `return_perf_metrics`")),
    ("first_scheduled_time_ns", Used("with `return_perf_metrics`")),
    ("first_token_time_ns", Used("with `return_perf_metrics`")),
    ("last_token_time_ns", Used("with `return_perf_metrics`")),
    ("acceptance_rate", Used("with `return_perf_metrics`")),
    ("total_accepted_draft_tokens", Used("with `return_perf_metrics`")),
    ("total_draft_tokens", Used("with `return_perf_metrics`")),
    ("context_phase_params", Ignored("prefill and decode run on the same ranks")),
];

/// Parameters of `preprocessing` and `postprocessing`.
pub const TEXT_PARAMETERS: &[Key] = &[
    ("tokenizer_dir", Used("directory of the tokenizer; default: the language model's")),
    ("tokenizer_path", Used("file of the tokenizer, relative to the version directory")),
    ("tokenizer_type", Used("format of the tokenizer: `auto`, `llama` or `t5`")),
    ("add_special_tokens", Used("whether the begin token is added to prompts; default: yes")),
    ("skip_special_tokens", Used("whether special tokens are excluded from the text; default: yes")),
    ("native", Used("`false` runs the model.py of the model; otherwise the native implementation replaces it")),
    ("gpt_model_path", Ignored("it is for images only")),
    ("engine_dir", Ignored("it is for images only")),
    ("visual_model_path", TEXT_ONLY),
    ("multimodal_model_path", TEXT_ONLY),
    ("hf_model_path", TEXT_ONLY),
    ("max_num_images", TEXT_ONLY),
];

/// Inputs of `preprocessing` and `postprocessing`.
pub const TEXT_INPUTS: &[Key] = &[
    ("QUERY", Used("the prompt")),
    ("DECODER_QUERY", Used("text for the decoder")),
    ("REQUEST_OUTPUT_LEN", Used("returned unchanged")),
    ("BAD_WORDS_DICT", Used("words that are never generated")),
    ("STOP_WORDS_DICT", Used("words that end the text")),
    ("EMBEDDING_BIAS_WORDS", Used("words with a bias")),
    ("EMBEDDING_BIAS_WEIGHTS", Used("the biases of these words")),
    ("END_ID", Used("returned unchanged")),
    ("PAD_ID", Used("pads shorter rows")),
    ("PROMPT_TABLE_EXTRA_ID", Used("returned unchanged")),
    ("PROMPT_EMBEDDING_TABLE", NO_IMAGES),
    ("IMAGE", NO_IMAGES),
    ("IMAGE_BYTES", NO_IMAGES),
    ("IMAGE_URL", NO_IMAGES),
    ("IMAGES", NO_IMAGES),
    ("VIDEO_BYTES", NO_IMAGES),
    ("TOKENS_BATCH", Used("token ids")),
    ("SEQUENCE_LENGTH", Used("number of tokens of each row")),
    ("sequence_length", Used("number of tokens whose text the client has")),
    ("skip_special_tokens", Used("whether special tokens are excluded from the text")),
    ("SEQUENCE_INDEX", Used("index of the sequence of the tokens")),
    ("SEQUENCE_END", Used("whether the sequence ends")),
    ("CUM_LOG_PROBS", Used("returned unchanged")),
    ("OUTPUT_LOG_PROBS", Used("returned unchanged")),
    ("CONTEXT_LOGITS", Used("returned unchanged")),
    ("GENERATION_LOGITS", Used("returned unchanged")),
    ("BATCH_INDEX", Used("returned unchanged")),
];

/// Outputs of `preprocessing` and `postprocessing`.
pub const TEXT_OUTPUTS: &[Key] = &[
    ("INPUT_ID", Used("the prompt's tokens")),
    ("REQUEST_INPUT_LEN", Used("their number")),
    ("DECODER_INPUT_ID", Used("tokens of the text for the decoder")),
    ("REQUEST_DECODER_INPUT_LEN", Used("their number")),
    ("REQUEST_OUTPUT_LEN", Used("returned unchanged")),
    ("BAD_WORDS_IDS", Used("tokens of words that are never generated")),
    ("STOP_WORDS_IDS", Used("tokens of words that end the text")),
    ("EMBEDDING_BIAS", Used("biases of tokens")),
    ("OUT_END_ID", Used("the request's, or else the tokenizer's")),
    ("OUT_PAD_ID", Used("the request's, or else the tokenizer's")),
    ("OUT_PROMPT_TABLE_EXTRA_IDS", Used("returned unchanged")),
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
    ("OUT_CUM_LOG_PROBS", Used("returned unchanged")),
    ("OUT_OUTPUT_LOG_PROBS", Used("returned unchanged")),
    ("OUT_CONTEXT_LOGITS", Used("returned unchanged")),
    ("OUT_GENERATION_LOGITS", Used("returned unchanged")),
    ("OUT_BATCH_INDEX", Used("returned unchanged")),
];

/// Parameters of `tensorrt_llm_bls`.
pub const BLS_PARAMETERS: &[Key] = &[
    ("accumulate_tokens", Used("each response of a stream has the whole text so far")),
    ("tensorrt_llm_model_name", Used("name of the language model; default: `tensorrt_llm`")),
    ("native", Used("`false` runs the model.py of the model; otherwise the native implementation replaces it")),
    ("tensorrt_llm_draft_model_name", NO_DRAFT),
    ("multimodal_encoders_name", TEXT_ONLY),
];

/// The effect of a key; `None` for one that is not in the table.
pub fn find(table: &[Key], name: &str) -> Option<Use> {
    table.iter().find(|(key, _)| *key == name).map(|&(_, use_)| use_)
}
