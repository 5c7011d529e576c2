//! What a text model's engine is asked for each prompt.

use serving::{InferError, InferRequest, Tensor};
use text::Detokenizer;

use super::super::engine_config::add_missing;
use super::super::text_names::{BAD_WORDS, EXCLUDE_INPUT, NAMES, STOP_WORDS};
use super::super::text_values::{Row, RunningText, find, flag};
use super::{Prepared, TextModel};
use crate::tokenize::add_special_tokens;
use crate::words::WordList;

impl TextModel {
    /// The engine's request for one prompt.
    fn engine_request(
        &self,
        request: &InferRequest,
        prompt: &str,
        row: Row,
        streaming: bool,
        words: &[Tensor],
    ) -> Result<InferRequest, InferError> {
        let wrong = |error| InferError::invalid(format!("cannot encode the prompt: {error}"));
        let ids = self.encoder.encode(prompt, add_special_tokens(request, self.add_special_tokens), wrong)?;
        let ids: Vec<i32> = ids.into_iter().map(u32::cast_signed).collect();
        let mut inputs = vec![
            Tensor::from_i32("input_ids", &[1, ids.len() as i64], &ids),
            Tensor::from_bool("streaming", &[1, 1], &[streaming]),
        ];
        for (name, aliases) in NAMES {
            let Some(tensor) = find(request, aliases) else { continue };
            inputs.push(row.of(tensor, name)?);
        }
        if !inputs.iter().any(|tensor| tensor.name == "request_output_len") {
            inputs.push(Tensor::from_i32("request_output_len", &[1, 1], &[self.max_tokens]));
        }
        match self.has_lmdeploys_defaults {
            true => add_missing(&mut inputs, lmdeploys_defaults()),
            false => inputs.extend(all_tokens(&inputs)),
        }
        if flag(request, &["ignore_eos"])?.unwrap_or(false) {
            inputs.retain(|tensor| tensor.name != "end_id");
            inputs.push(Tensor::from_i32("end_id", &[1, 1], &[-1]));
        }
        inputs.extend(words.iter().cloned());
        Ok(InferRequest { inputs, requested_outputs: Vec::new(), ..request.clone() })
    }

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

    /// The running text of one prompt's answer.
    fn text(&self, request: &InferRequest, prompt: &str, streaming: bool) -> Result<RunningText, InferError> {
        let skip = flag(request, &["skip_special_tokens"])?.unwrap_or(true);
        // As in TensorRT-LLM: a stream never repeats its prompt.
        let leading = match streaming || flag(request, &EXCLUDE_INPUT)?.unwrap_or(true) {
            true => String::new(),
            false => prompt.to_owned(),
        };
        let max_tokens = find(request, NAMES[0].1).and_then(|tensor| tensor.to_i32()?.first().copied());
        Ok(RunningText {
            detokenizer: Detokenizer::new(self.encoder.tokenizer.clone(), skip),
            piece: leading,
            log_probs: Vec::new(),
            cumulative: 0.0,
            num_tokens: 0,
            max_tokens: usize::try_from(max_tokens.unwrap_or(self.max_tokens)).unwrap_or(0),
        })
    }

    /// What the engine is asked for each prompt.
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
            let row = Row { index, count: prompts.len() };
            let engine_request = self.engine_request(request, prompt, row, streaming, &words)?;
            Ok((engine_request, self.text(request, prompt, streaming)?))
        };
        prompts.iter().enumerate().map(prepare).collect()
    }
}

/// What draws from all tokens where a temperature or a top-k of 0 stands alone: text models take that for sampling, where the
/// engine under them, as TensorRT-LLM, is greedy.
fn all_tokens(inputs: &[Tensor]) -> Option<Tensor> {
    let find = |name: &str| inputs.iter().find(|tensor| tensor.name == name);
    let asks = find("temperature").is_some() || find("runtime_top_k").is_some();
    (asks && find("runtime_top_p").is_none()).then(|| Tensor::from_f32("runtime_top_p", &[1, 1], &[1.0]))
}

/// What LMDeploy takes where a request does not say (`GenerationConfig` of 0.4): greedy without a top-k.
fn lmdeploys_defaults() -> [Tensor; 3] {
    [
        Tensor::from_i32("runtime_top_k", &[1, 1], &[1]),
        Tensor::from_f32("runtime_top_p", &[1, 1], &[1.0]),
        Tensor::from_f32("temperature", &[1, 1], &[0.8]),
    ]
}
