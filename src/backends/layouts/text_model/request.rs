//! Requests of a text model to its engine.

use generation::input_names::{BAD_WORDS, EXCLUDE_INPUT, NAMES, STOP_WORDS};
use serving::{InferError, InferRequest, Tensor};
use text::Detokenizer;

use super::super::engine_request::{EngineInputs, Row};
use super::super::text_values::RunningText;
use super::{Prepared, TextModel};
use crate::tensor_values::first;
use crate::tokenize::add_special_tokens;
use crate::words::WordList;

impl TextModel {
    /// The engine's request for each prompt, with the text of its output.
    pub(super) fn prepare(
        &self,
        request: &InferRequest,
        prompts: &[String],
        streaming: bool,
    ) -> Result<Vec<Prepared>, InferError> {
        let stop_words = self.words(request, &STOP_WORDS, "stop_words_list")?;
        let bad_words = self.words(request, &BAD_WORDS, "bad_words_list")?;
        let words: Vec<Tensor> = stop_words.into_iter().chain(bad_words).collect();
        let prepare = |(index, prompt): (usize, &String)| {
            let mut inputs = self.engine_inputs(request, prompt, Row { index, count: prompts.len() }, streaming)?;
            inputs.extend(words.iter().cloned());
            let text = self.running_text(request, prompt, &inputs, streaming)?;
            Ok((inputs.into_request(request), text))
        };
        prompts.iter().enumerate().map(prepare).collect()
    }

    /// The engine's inputs for one prompt, without words.
    fn engine_inputs(
        &self,
        request: &InferRequest,
        prompt: &str,
        row: Row,
        streaming: bool,
    ) -> Result<EngineInputs, InferError> {
        let wrong = |error| InferError::invalid(format!("cannot encode the prompt: {error}"));
        let ids = self.encoder.encode(prompt, add_special_tokens(request, self.add_special_tokens), wrong)?;
        let mut inputs = EngineInputs::new(&ids, streaming);
        inputs.add_named(request, NAMES, row)?;
        inputs.add_defaults([Tensor::from_i32("request_output_len", &[1, 1], &[self.max_tokens])]);
        match self.has_lmdeploy_defaults {
            true => inputs.add_defaults(lmdeploy_defaults()),
            false if inputs.get("temperature").or(inputs.get("runtime_top_k")).is_some() => {
                inputs.add_defaults([sample_all_tokens()]);
            }
            false => {}
        }
        if inputs.get("beam_width").is_some() {
            inputs.add_defaults([Tensor::from_i32("num_return_sequences", &[1, 1], &[1])]); // The best beam is the text.
        }
        if first(request, &["ignore_eos"])?.unwrap_or(false) {
            inputs.replace(Tensor::from_i32("end_id", &[1, 1], &[-1]));
        }
        Ok(inputs)
    }

    /// The token spellings of a list of words, as the engine's input `output`.
    fn words(&self, request: &InferRequest, names: &[&str], output: &str) -> Result<Option<Tensor>, InferError> {
        let tensor = names.iter().filter_map(|name| request.input(name)).find_map(|tensor| tensor.to_byte_strings());
        let Some(words) = tensor else { return Ok(None) };
        let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word)).collect();
        let words: Vec<&str> = words.iter().map(|word| &**word).collect();
        let list = WordList::encode(&self.encoder.tokenizer, &self.limits, &words)?;
        let mut values = Vec::new();
        list.write(list.width(), &mut values);
        Ok(Some(Tensor::from_i32(output, &[1, 2, list.width() as i64], &values)))
    }

    /// The text of the output for one prompt.
    fn running_text(
        &self,
        request: &InferRequest,
        prompt: &str,
        inputs: &EngineInputs,
        streaming: bool,
    ) -> Result<RunningText, InferError> {
        let skip = first(request, &["skip_special_tokens"])?.unwrap_or(true);
        // As in TensorRT-LLM, a stream never includes its prompt.
        let excludes_prompt = streaming || first(request, &EXCLUDE_INPUT)?.unwrap_or(true);
        let leading = if excludes_prompt { String::new() } else { prompt.to_owned() };
        let max_tokens = inputs.get("request_output_len").and_then(|tensor| tensor.to_i32()?.first().copied());
        let max_tokens = usize::try_from(max_tokens.unwrap_or(self.max_tokens)).unwrap_or(0);
        Ok(RunningText::new(Detokenizer::new(self.encoder.tokenizer.clone(), skip), leading, max_tokens))
    }
}

/// The default top-p of a request with a temperature or a top-k: text models then sample from all tokens, where the engine, like
/// TensorRT-LLM, is greedy without a top-p.
fn sample_all_tokens() -> Tensor {
    Tensor::from_f32("runtime_top_p", &[1, 1], &[1.0])
}

/// LMDeploy's defaults (`GenerationConfig` of 0.4): greedy without a top-k.
fn lmdeploy_defaults() -> [Tensor; 3] {
    [
        Tensor::from_i32("runtime_top_k", &[1, 1], &[1]),
        Tensor::from_f32("runtime_top_p", &[1, 1], &[1.0]),
        Tensor::from_f32("temperature", &[1, 1], &[0.8]),
    ]
}
