//! How tokens are chosen: the fields that all endpoints have in common.

use std::sync::Arc;

use engine::{BeamParams, Request, SamplingParams, TokenId};
use generation::{
    ConstraintSpec, GenerateRequest, Generator, Guide, Preface, ReasoningBudget, SamplingDefaults, StartAfter,
    StopTexts, TextOptions,
};
use serving::Limits;

use super::error::ApiError;
use super::fields::Fields;
use super::guide;
use super::parameter_fields::{
    Beams, MAX_TOKENS, allowed_token_ids, beams, cache_salt, logit_bias, prompt_logprobs, stream_options, truncation,
};
use crate::api::request_key::drawn_number;

/// Tokens to generate when a completion does not say: OpenAI's own number.
pub(super) const COMPLETION_TOKENS: u32 = 16;
/// Maximum number of choices of a request.
const MAX_CHOICES: i64 = 128;
/// Maximum number of stop strings of a request, and of bad words.
pub(super) const MAX_STOPS: usize = 64;
/// Temperatures below this are greedy: their inverse is beyond what logits can be scaled by.
const LEAST_TEMPERATURE: f64 = 1e-6;
/// Range of `priority`.
const MAX_PRIORITY: i64 = 1 << 19;

/// Settings of one request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parameters {
    pub(super) n: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// Each chunk of a stream has the usage so far.
    pub(super) continuous_usage: bool,
    /// `None`: the rest of the context.
    pub(super) max_tokens: Option<u32>,
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    pub(super) top_k: Option<u32>,
    pub(super) min_p: Option<f32>,
    pub(super) seed: Option<u64>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) min_tokens: Option<u32>,
    pub(super) stop: Vec<String>,
    pub(super) includes_stop: bool,
    pub(super) stop_token_ids: Vec<u32>,
    pub(super) ignore_eos: bool,
    pub(super) logit_bias: Vec<(u32, f32)>,
    /// Only these are generated; empty for no such limit.
    pub(super) allowed_token_ids: Vec<u32>,
    /// What the answer must be, and the field that says so.
    pub(super) constraint: Option<(&'static str, ConstraintSpec)>,
    /// The part of the answer after which `constraint` applies.
    pub(super) constrained_after: Option<StartAfter>,
    /// Reasoning with which the answer may begin, before `constraint` applies.
    pub(super) preface: Option<Preface>,
    /// Most tokens of the reasoning.
    pub(super) thinking_budget: Option<ThinkingBudget>,
    /// The markers of the reasoning with its budget.
    pub(super) reasoning: Option<ReasoningBudget>,
    /// Requests share cached prefixes with those of the same salt only.
    pub(super) cache_salt: Option<u64>,
    pub(super) bad_words: Vec<String>,
    /// `Some(k)`: log-probabilities of the chosen tokens, and of the `k` likeliest.
    pub(super) logprobs: Option<u32>,
    pub(super) prompt_logprobs: Option<u32>,
    /// The same for a prompt that is echoed with its log-probabilities.
    pub(super) echoed_logprobs: Option<u32>,
    pub(super) skip_special_tokens: bool,
    pub(super) add_special_tokens: Option<bool>,
    pub(super) truncate_prompt_tokens: Option<usize>,
    pub(super) return_token_ids: bool,
    pub(super) beams: Option<Beams>,
    /// Lower values are served first.
    pub(super) priority: i32,
    /// Replaces a seed that the request does not have.
    pub(super) drawn_seed: u64,
}

/// Most tokens of the reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ThinkingBudget {
    pub(super) tokens: usize,
    /// Whether a model without reasoning is an error.
    pub(super) is_demanded: bool,
}

impl Parameters {
    /// Reads the fields that all endpoints have in common. The caller reads `max_tokens` and `logprobs`, which differ.
    ///
    /// # Errors
    /// When a field has an invalid value; the error names it.
    pub(crate) fn read(fields: &mut Fields, limits: &Limits) -> Result<Self, ApiError> {
        let float = |value: Option<f64>| value.map(|value| value as f32);
        let stream = fields.flag("stream")?.unwrap_or(false);
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        let n = fields.whole("n", 1, MAX_CHOICES)?.unwrap_or(1) as usize;
        let best_of = format!("send `n` alone; here it is {n}");
        fields.refuse_unless("best_of", |value| value.as_u64() == Some(n as u64), &best_of)?;
        fields.refuse_unless(
            "spaces_between_special_tokens",
            |value| value == true,
            "tokens are decoded as they are",
        )?;
        Ok(Self {
            n,
            stream,
            include_usage,
            continuous_usage,
            max_tokens: None,
            temperature: fields
                .number("temperature", 0.0, 2.0)?
                .map(|value| if value < LEAST_TEMPERATURE { 0.0 } else { value as f32 }),
            // 0 keeps the likeliest token.
            top_p: float(fields.number("top_p", 0.0, 1.0)?.map(|top_p| top_p.max(f64::from(f32::MIN_POSITIVE)))),
            // vLLM's clients send -1 for all tokens.
            top_k: fields.whole("top_k", -1, MAX_TOKENS)?.map(|top_k| top_k.max(0) as u32),
            min_p: float(fields.number("min_p", 0.0, 1.0)?.map(|min_p| min_p.min(0.999_999))),
            seed: fields.seed()?,
            presence_penalty: float(fields.number("presence_penalty", -2.0, 2.0)?),
            frequency_penalty: float(fields.number("frequency_penalty", -2.0, 2.0)?),
            repetition_penalty: float(fields.number("repetition_penalty", f64::from(f32::MIN_POSITIVE), 10.0)?),
            min_tokens: fields.whole("min_tokens", 0, MAX_TOKENS)?.map(|tokens| tokens as u32),
            stop: fields.texts("stop", MAX_STOPS, limits)?,
            includes_stop: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
            stop_token_ids: fields.token_ids("stop_token_ids", MAX_STOPS)?.unwrap_or_default(),
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            logit_bias: logit_bias(fields, limits)?,
            allowed_token_ids: allowed_token_ids(fields)?,
            constraint: guide::read(fields)?,
            constrained_after: None,
            preface: None,
            thinking_budget: fields
                .whole("thinking_token_budget", 0, MAX_TOKENS)?
                .map(|tokens| ThinkingBudget { tokens: tokens as usize, is_demanded: true }),
            reasoning: None,
            cache_salt: cache_salt(fields)?,
            bad_words: fields.texts("bad_words", MAX_STOPS, limits)?,
            logprobs: None,
            prompt_logprobs: prompt_logprobs(fields, stream)?,
            echoed_logprobs: None,
            skip_special_tokens: fields.flag("skip_special_tokens")?.unwrap_or(true),
            add_special_tokens: fields.flag("add_special_tokens")?,
            truncate_prompt_tokens: truncation(fields)?,
            return_token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            beams: beams(fields, n, stream)?,
            priority: fields.whole("priority", -MAX_PRIORITY, MAX_PRIORITY)?.unwrap_or(0) as i32,
            // It fits the narrowest input that a model has for a seed, with room for the numbers of the choices.
            drawn_seed: drawn_number() >> 34,
        })
    }

    /// Refuses the settings of completions that an answer of one turn has no place for, and sets what `field` says that the
    /// answer must be.
    ///
    /// # Errors
    /// When there is one, or another field says what the answer must be.
    pub(super) fn for_one_turn(&mut self, field: &'static str, spec: Option<ConstraintSpec>) -> Result<(), ApiError> {
        let set = [
            ("n", self.n != 1),
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
            ("return_token_ids", self.return_token_ids),
            ("stream_options", self.include_usage || self.continuous_usage),
            ("use_beam_search", self.beams.is_some()),
        ];
        if let Some((name, _)) = set.into_iter().find(|(_, is_set)| *is_set) {
            return Err(ApiError::of_field(
                name,
                format!("`{name}` is not supported by this endpoint: an answer is one turn."),
            ));
        }
        if spec.is_some() && self.constraint.is_some() {
            let words = format!("`{field}` and another field both say what the answer must be; send one of them.");
            return Err(ApiError::of_field(field, words));
        }
        self.constraint = spec.map(|spec| (field, spec)).or(self.constraint.take());
        Ok(())
    }

    /// The request for the choices from number `first` on: one choice, or all beams. Where the request has no value,
    /// `defaults` apply.
    ///
    /// # Errors
    /// When the prompt and the request's settings do not fit the model.
    pub(super) fn request(
        &self,
        generator: &Generator,
        defaults: &SamplingDefaults,
        prompt: &[u32],
        first: usize,
    ) -> Result<GenerateRequest, ApiError> {
        let room = generator.max_output_len(prompt.len());
        if room == 0 {
            let most = generator.max_sequence_len.min(generator.num_kv_positions).saturating_sub(1);
            return Err(ApiError::context_overflow(prompt.len(), most));
        }
        // A request for no tokens computes one, which is dropped.
        let max_tokens = self.max_tokens.map_or(room as u32, |tokens| tokens.max(1));
        let temperature = self.temperature.or(defaults.temperature).unwrap_or(1.0);
        let sampling = SamplingParams {
            temperature,
            top_k: self.top_k.or(defaults.top_k).unwrap_or(0),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            seed: self.seed_of(first),
            min_tokens: self.min_tokens.unwrap_or(0),
            end_ids: self.end_ids(generator),
            logit_bias: self.logit_bias.iter().map(|&(token, bias)| (TokenId(token), bias)).collect(),
            bad_words: bad_words(generator, &self.bad_words),
            num_logprobs: self.logprobs,
            ..SamplingParams::default()
        };
        let sequence = Request {
            prompt: prompt.iter().copied().map(TokenId).collect(),
            max_tokens,
            sampling,
            beams: self.beams.map(|Beams { length_penalty, early_stopping }| BeamParams {
                width: self.n as u32,
                len_penalty: length_penalty,
                early_stopping,
                diversity_rate: 0.0,
            }),
            max_drafts: generator.max_drafts,
            cache_salt: self.cache_salt,
            ..Request::default()
        };
        Ok(GenerateRequest {
            sequence,
            num_sequences: if self.beams.is_some() { self.n } else { 1 },
            stop: StopTexts { texts: self.stop.clone(), is_included: self.includes_stop },
            guide: Guide {
                spec: self.constraint.as_ref().map(|(_, spec)| spec.clone()),
                preface: self.preface.clone(),
                starts_after: self.constrained_after.clone(),
                allowed_tokens: self.allowed_token_ids.iter().copied().map(TokenId).collect(),
                reasoning: self.reasoning.clone(),
            },
            text: Some(TextOptions { skip_special_tokens: self.skip_special_tokens }),
            prompt_logprobs: self.computed_prompt_logprobs(first),
            priority_offset: self.priority,
            ..GenerateRequest::default()
        })
    }

    /// `Some(k)`: the request for the choices from number `first` on computes the log-probabilities of the prompt, with the `k`
    /// likeliest tokens. The choices of a prompt share those of the first one, except in a stream, where each begins by itself.
    fn computed_prompt_logprobs(&self, first: usize) -> Option<u32> {
        let has_them = first.is_multiple_of(self.n) || self.stream;
        self.prompt_logprobs.max(self.echoed_logprobs).filter(|_| has_them)
    }

    /// The seed of a choice. One that the client gave counts from the first choice of each prompt, so that a prompt in a list
    /// has the answers that it has alone.
    pub(super) fn seed_of(&self, choice: usize) -> u64 {
        let (seed, number) = self.seed.map_or((self.drawn_seed, choice), |seed| (seed, choice % self.n));
        seed.wrapping_add(number as u64)
    }

    /// Number of requests to the model for each prompt.
    pub(super) fn calls_per_prompt(&self) -> usize {
        if self.beams.is_some() { 1 } else { self.n }
    }

    /// The `stop_token_ids` at which the model would not end.
    pub(super) fn own_stop_ids(&self, generator: &Generator) -> Arc<[u32]> {
        let ends_model = |id: u32| !self.ignore_eos && generator.end_ids.contains(&TokenId(id));
        self.stop_token_ids.iter().copied().filter(|&id| !ends_model(id)).collect()
    }

    fn end_ids(&self, generator: &Generator) -> Vec<TokenId> {
        let own = generator.end_ids.iter().copied().filter(|_| !self.ignore_eos);
        own.chain(self.stop_token_ids.iter().copied().map(TokenId)).collect()
    }
}

/// Token sequences that spell the words, at the start of a text and behind a space.
fn bad_words(generator: &Generator, words: &[String]) -> Vec<Vec<TokenId>> {
    let encode = |text: &str| -> Vec<TokenId> {
        generator.tokenizer.encode(text, false).unwrap_or_default().into_iter().map(TokenId).collect()
    };
    let spellings = words.iter().flat_map(|word| [encode(word), encode(&format!(" {}", word.trim_start()))]);
    let mut spellings: Vec<Vec<TokenId>> = spellings.filter(|tokens| !tokens.is_empty()).collect();
    spellings.sort();
    spellings.dedup();
    spellings
}
