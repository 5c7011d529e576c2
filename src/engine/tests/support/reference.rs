//! The expected outputs of requests, computed without an engine.

use engine::{FinishReason, Request, TokenId};

use super::tokens::VOCAB_SIZE;
use super::tokens::digest;
use super::tokens::digests;
use super::tokens::log_prob;
use super::tokens::next_token;

/// What a request generates when it runs alone, computed in the simplest way: all generated tokens, how many of them
/// are released, and why it ends.
pub fn run_alone(request: &Request, max_sequence_len: usize) -> (Vec<TokenId>, usize, FinishReason) {
    let mut last = digests(&request.prompt).last().unwrap();
    let max_tokens = (request.max_tokens as usize).min(max_sequence_len - request.prompt.len());
    let mut output = Vec::new();
    loop {
        let token = next_token(last);
        last = digest(last, token);
        if request.sampling.end_ids.contains(&token) {
            return (output.clone(), output.len(), FinishReason::EndId(Some(token)));
        }
        output.push(token);
        let completed = request.stop_words.iter().filter(|word| output.ends_with(word)).map(Vec::len).max();
        if let Some(len) = completed {
            return (output.clone(), output.len() - len, FinishReason::StopWord);
        }
        if output.len() == max_tokens {
            return (output.clone(), output.len(), FinishReason::Length);
        }
    }
}

/// The log-probabilities of these generated tokens, if the request wants them.
pub fn logprobs_alone(request: &Request, generated: &[TokenId]) -> Vec<Option<f32>> {
    let tokens = [request.prompt.as_slice(), generated].concat();
    let before = digests(&tokens).skip(request.prompt.len() - 1).zip(generated);
    before.map(|(last, &token)| request.sampling.num_logprobs.map(|_| log_prob(last, token))).collect()
}

/// A beam's tokens and their log-probability.
type Beam = (Vec<TokenId>, f32);

/// The outputs of a beam search that runs alone, by the rules of transformers, with every continuation scored and
/// sorted.
pub fn run_beams_alone(request: &Request, max_sequence_len: usize) -> Vec<Vec<TokenId>> {
    let params = request.beams.unwrap();
    let (width, max_tokens) =
        (params.width as usize, (request.max_tokens as usize).min(max_sequence_len - request.prompt.len()));
    let score = |beam: &Beam| beam.1 / (beam.0.len() as f32).powf(params.len_penalty);
    let stop_len = |tokens: &[TokenId]| match request.sampling.end_ids.contains(tokens.last().unwrap()) {
        true => Some(1),
        false => request.stop_words.iter().filter(|word| tokens.ends_with(word)).map(Vec::len).max(),
    };
    let (mut running, mut finished): (Vec<Beam>, Vec<Beam>) = (vec![(vec![], 0.0)], vec![]);
    for len in 1..=max_tokens {
        let mut all: Vec<(f32, Beam)> = Vec::new();
        for (index, (tokens, sum)) in running.iter().enumerate() {
            let last = digests(&[request.prompt.as_slice(), tokens].concat()).last().unwrap();
            let mut own: Vec<_> =
                (0..VOCAB_SIZE).map(|token| (log_prob(last, TokenId(token)), TokenId(token))).collect();
            own.sort_by(|a, b| b.0.total_cmp(&a.0));
            all.extend(own.into_iter().map(|(log_prob, token)| {
                let sum = log_prob + sum;
                (sum + params.diversity_rate * index as f32, ([tokens.as_slice(), &[token]].concat(), sum))
            }));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let ends = |beam: &Beam| len == max_tokens || stop_len(&beam.0).is_some();
        finished.extend(all.iter().take(width).filter(|(_, beam)| ends(beam)).map(|(_, beam)| beam.clone()));
        finished.sort_by(|a, b| score(b).total_cmp(&score(a)));
        finished.truncate(width);
        running = all.into_iter().map(|(_, beam)| beam).filter(|beam| !ends(beam)).take(width).collect();
        let best = running.iter().map(score).fold(f32::NEG_INFINITY, f32::max);
        let is_full = finished.len() == width;
        if running.is_empty() || is_full && (params.early_stopping || best <= score(&finished[width - 1])) {
            break;
        }
    }
    let released = |(tokens, _): Beam| tokens[..tokens.len() - stop_len(&tokens).unwrap_or(0)].to_vec();
    finished.into_iter().map(released).collect()
}
