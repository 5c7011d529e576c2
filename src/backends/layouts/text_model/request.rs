//! The request of a text model as a request to generate text.

use engine::TokenId;
use generation::input_names::{BAD_WORDS, EXCLUDE_INPUT, NAMES, STOP_WORDS};
use generation::{GenerateRequest, SamplingDefaults, TextOptions};
use serving::{GenerateCall, InferError, InferRequest};

use super::super::engine_request::{Row, row_inputs};
use super::TextModel;
use super::inputs::words;
use super::row_text::RowText;
use crate::llm::inputs::{RequestDefaults, check_streaming, generation};
use crate::tensor_values::first;
use crate::tokenize::add_special_tokens;
use crate::words::{WordList, check_words};

/// LMDeploy's defaults (`GenerationConfig` of 0.4): greedy without a top-k.
const LMDEPLOY_DEFAULTS: SamplingDefaults = SamplingDefaults {
    temperature: Some(0.8),
    top_p: Some(1.0),
    top_k: Some(1),
    min_p: None,
    repetition_penalty: None,
};

/// What a request has for all of its prompts.
struct Common {
    stop_words: Vec<String>,
    bad_words: Vec<Vec<TokenId>>,
    options: TextOptions,
    add_special_tokens: bool,
    ignores_end: bool,
}

impl TextModel {
    /// The call for each prompt, with the text that its output begins with.
    pub(super) fn prepare(
        &self,
        request: &InferRequest,
        prompts: &[String],
        streaming: bool,
    ) -> Result<Vec<(GenerateCall, RowText)>, InferError> {
        let bad_words = words(request, &BAD_WORDS);
        let bad_words: Vec<&str> = bad_words.iter().map(String::as_str).collect();
        let common = Common {
            stop_words: words(request, &STOP_WORDS),
            bad_words: WordList::encode(&self.encoder.tokenizer, &self.limits, &bad_words)?.into_tokens(),
            options: TextOptions { skip_special_tokens: first(request, &["skip_special_tokens"])?.unwrap_or(true) },
            add_special_tokens: add_special_tokens(request, self.add_special_tokens),
            ignores_end: first(request, &["ignore_eos"])?.unwrap_or(false),
        };
        let stop_words: Vec<&str> = common.stop_words.iter().map(String::as_str).collect();
        check_words(&self.limits, &stop_words)?;
        // As in TensorRT-LLM, a stream never includes its prompt.
        let excludes_prompt = streaming || first(request, &EXCLUDE_INPUT)?.unwrap_or(true);
        let prepare = |(index, prompt): (usize, &String)| {
            let generate = self.generate_request(request, prompt, Row { index, count: prompts.len() }, &common)?;
            check_streaming(true, streaming, generate.sequence.beams.as_ref())?;
            let text = RowText {
                text: if excludes_prompt { String::new() } else { prompt.clone() },
                returns_log_probs: generate.sequence.sampling.num_logprobs.is_some(),
                ..RowText::default()
            };
            Ok((GenerateCall { id: request.id.clone(), ..GenerateCall::new("", generate) }, text))
        };
        prompts.iter().enumerate().map(prepare).collect()
    }

    /// The request for one prompt.
    fn generate_request(
        &self,
        request: &InferRequest,
        prompt: &str,
        row: Row,
        common: &Common,
    ) -> Result<GenerateRequest, InferError> {
        let wrong = |error| InferError::invalid(format!("cannot encode the prompt: {error}"));
        let ids = self.encoder.encode(prompt, common.add_special_tokens, wrong)?;
        let row = InferRequest { inputs: row_inputs(request, NAMES, row)?, ..request.clone() };
        let samples = row.input("temperature").or(row.input("runtime_top_k")).is_some();
        let sampling = match self.has_lmdeploy_defaults {
            true => LMDEPLOY_DEFAULTS,
            // Text models then sample from all tokens, where the engine, like TensorRT-LLM, is greedy without a top-p.
            false if samples => SamplingDefaults { top_p: Some(1.0), ..SamplingDefaults::default() },
            false => SamplingDefaults::default(),
        };
        let defaults = RequestDefaults { max_tokens: Some(self.max_tokens), sampling };
        let mut generate = generation(&self.engine().bounds.of_values()?, &row, &defaults)?;
        generate.num_sequences = 1; // The best beam is the text.
        generate.sequence.prompt = ids.into_iter().map(TokenId).collect();
        generate.sequence.sampling.bad_words = common.bad_words.clone();
        if common.ignores_end {
            generate.sequence.sampling.end_ids.clear();
        }
        self.add_stop_words(&mut generate, common)?;
        generate.text = Some(common.options);
        Ok(generate)
    }

    /// Ends the text at stop words. The text may exclude special tokens, so words with special tokens are found by their ids, too.
    fn add_stop_words(&self, generate: &mut GenerateRequest, common: &Common) -> Result<(), InferError> {
        let tokenizer = &self.encoder.tokenizer;
        for word in common.stop_words.iter().filter(|word| !word.is_empty()) {
            let wrong = |error| InferError::invalid(format!("cannot encode a word: {error}"));
            let ids = tokenizer.encode(word, false).map_err(wrong)?;
            if common.options.skip_special_tokens && tokenizer.decode(&ids, true) != tokenizer.decode(&ids, false) {
                generate.sequence.stop_words.push(ids.into_iter().map(TokenId).collect());
            }
        }
        generate.stop.texts = common.stop_words.clone();
        Ok(())
    }
}
