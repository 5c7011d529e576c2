//! Chooses a token from a row's logits, in the order that [`engine::SamplingParams`] documents.
//!
//! Ties for the likeliest token go to the lowest id; ties at a threshold are kept. A draw at output position `n` is a
//! function of the logits, the seed and `n`.

use std::cell::RefCell;
use std::cmp::Ordering;

use engine::{RowId, SampledToken, TokenId};
use kernels::cpu::exp;

use super::rows::Row;

/// Number of candidates sorted first to find those that `top_p` keeps; each further attempt sorts 8 times as many.
const FIRST_SORTED: usize = 128;

/// A token that may be drawn, with its weight.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    weight: f32,
}

#[derive(Default)]
struct Scratch {
    raw: Vec<f32>,
    candidates: Vec<Candidate>,
    values: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Chooses the token at output position `num_generated` of `row`, among those of `mask` if there is one. Penalties and
/// bans are applied to `logits` in place.
pub(crate) fn choose(
    id: RowId,
    row: &Row,
    num_generated: u32,
    logits: &mut [f32],
    mask: Option<&[u32]>,
) -> SampledToken {
    SCRATCH.with_borrow_mut(|scratch| {
        let params = &row.sampling;
        if params.beam_candidates > 0 {
            return continuations(id, row, num_generated, logits, &mut scratch.candidates);
        }
        let Some(num_logprobs) = params.num_logprobs else {
            adjust(row, num_generated, logits);
            forbid(mask, logits);
            let token = draw(row, num_generated, logits, scratch);
            return SampledToken { row: id, token: TokenId(token), logprob: None, top: Vec::new() };
        };
        scratch.raw.clear();
        scratch.raw.extend_from_slice(logits);
        adjust(row, num_generated, logits);
        forbid(mask, logits);
        let token = draw(row, num_generated, logits, scratch);
        let total = log_sum_exp(&scratch.raw);
        let logprob = |token: u32| (f64::from(scratch.raw[token as usize]) - total) as f32;
        let best = likeliest(&scratch.raw, num_logprobs as usize, &mut scratch.candidates);
        let top = best.iter().map(|c| (TokenId(c.token), logprob(c.token))).collect();
        SampledToken { row: id, token: TokenId(token), logprob: Some(logprob(token)), top }
    })
}

/// The token that `row` would choose at output position `num_generated` by these logits, which are those of another head.
pub(crate) fn guess(row: &Row, num_generated: u32, logits: &mut [f32]) -> u32 {
    SCRATCH.with_borrow_mut(|scratch| {
        adjust(row, num_generated, logits);
        draw(row, num_generated, logits, scratch)
    })
}

/// The likeliest tokens for a beam: computes log-probabilities, then applies penalties, bias and bans to them.
fn continuations(
    id: RowId,
    row: &Row,
    num_generated: u32,
    logits: &mut [f32],
    candidates: &mut Vec<Candidate>,
) -> SampledToken {
    let total = log_sum_exp(logits);
    logits.iter_mut().for_each(|logit| *logit = (f64::from(*logit) - total) as f32);
    adjust(row, num_generated, logits);
    let best = likeliest(logits, row.sampling.beam_candidates as usize, candidates);
    let top: Vec<(TokenId, f32)> = best.iter().map(|c| (TokenId(c.token), c.weight)).collect();
    SampledToken { row: id, token: top.first().map_or(TokenId(0), |(token, _)| *token), logprob: None, top }
}

/// Forbids the tokens that are not in the mask: bit `id % 32` of word `id / 32` allows token `id`.
fn forbid(mask: Option<&[u32]>, logits: &mut [f32]) {
    let Some(mask) = mask else { return };
    for (index, logits) in logits.chunks_mut(32).enumerate() {
        let word = mask.get(index).copied().unwrap_or(0);
        if word != u32::MAX {
            let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
            forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
    }
}

/// Applies penalties, bias and bans.
fn adjust(row: &Row, num_generated: u32, logits: &mut [f32]) {
    let params = &row.sampling;
    if params.uses_raw_logits() {
        return;
    }
    for (token, count) in row.counts() {
        let Some(logit) = logits.get_mut(token as usize) else { continue };
        *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        if count.generated > 0 {
            *logit -= params.presence_penalty + params.frequency_penalty * count.generated as f32;
        }
    }
    for (token, bias) in &params.logit_bias {
        if let Some(logit) = logits.get_mut(token.0 as usize) {
            *logit += bias;
        }
    }
    let mut ban = |token: TokenId| {
        if let Some(logit) = logits.get_mut(token.0 as usize) {
            *logit = f32::NEG_INFINITY;
        }
    };
    for word in &params.bad_words {
        let Some((last, start)) = word.split_last() else { continue };
        if ends_with(row.tokens(), start) {
            ban(*last);
        }
    }
    if num_generated < params.min_tokens {
        params.end_ids.iter().for_each(|token| ban(*token));
    }
}

fn ends_with(tokens: &[u32], end: &[TokenId]) -> bool {
    tokens.len() >= end.len() && tokens[tokens.len() - end.len()..].iter().zip(end).all(|(a, b)| *a == b.0)
}

fn draw(row: &Row, num_generated: u32, logits: &[f32], scratch: &mut Scratch) -> u32 {
    let params = &row.sampling;
    let best = argmax(logits);
    let max = logits[best as usize];
    if params.is_greedy() || !max.is_finite() {
        return best;
    }
    keep(row, logits, max, scratch);
    let candidates = &scratch.candidates;
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    let mut left = uniform(params.seed, num_generated) * total;
    for candidate in candidates {
        left -= f64::from(candidate.weight);
        if left < 0.0 {
            return candidate.token;
        }
    }
    candidates.last().map_or(best, |candidate| candidate.token)
}

/// Selects the tokens that may be drawn, with their weights. The likeliest token has logit `max` and weight 1.
fn keep(row: &Row, logits: &[f32], max: f32, scratch: &mut Scratch) {
    let params = &row.sampling;
    let Scratch { candidates, values, .. } = scratch;
    let inverse = 1.0 / params.temperature;
    let weigh = |(token, logit): (usize, &f32)| Candidate { token: token as u32, weight: exp((logit - max) * inverse) };
    candidates.clear();
    // Most tokens may be banned by a mask, and their exponentials take longest.
    let possible = logits.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
    candidates.extend(possible.map(weigh).filter(|c| c.weight > 0.0));
    if params.top_k > 0 && (params.top_k as usize) < candidates.len() {
        keep_top_k(candidates, logits, params.top_k as usize, values);
    }
    if row.top_p() < 1.0 {
        keep_top_p(candidates, row.top_p(), values);
    }
    if params.min_p > 0.0 {
        candidates.retain(|candidate| candidate.weight >= params.min_p);
    }
}

/// Keeps the `top_k` highest logits and those equal to the last of them. It compares logits, not weights: distinct
/// logits may have equal weights.
fn keep_top_k(candidates: &mut Vec<Candidate>, logits: &[f32], top_k: usize, values: &mut Vec<f32>) {
    let logit = |candidate: &Candidate| logits[candidate.token as usize];
    values.clear();
    values.extend(candidates.iter().map(logit));
    let (_, &mut least, _) = values.select_nth_unstable_by(top_k - 1, highest_first);
    candidates.retain(|candidate| logit(candidate) >= least);
}

/// Keeps the smallest set of heaviest candidates that reaches `top_p` of the total weight, and those equal to the last
/// of them.
fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f32, values: &mut Vec<f32>) {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    let goal = total * f64::from(top_p);
    values.clear();
    values.extend(candidates.iter().map(|candidate| candidate.weight));
    let mut sorted = FIRST_SORTED;
    loop {
        let count = sorted.min(values.len());
        if count < values.len() {
            values.select_nth_unstable_by(count - 1, highest_first);
        }
        values[..count].sort_unstable_by(highest_first);
        let mut reached = 0.0;
        let last = values[..count].iter().find(|&&weight| {
            reached += f64::from(weight);
            reached >= goal
        });
        if let Some(&least) = last {
            return candidates.retain(|candidate| candidate.weight >= least);
        }
        if count == values.len() {
            return;
        }
        sorted *= 8;
    }
}

fn highest_first(a: &f32, b: &f32) -> Ordering {
    b.total_cmp(a)
}

fn heavier_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
}

/// The `n` tokens of the highest logits, best first.
fn likeliest<'a>(logits: &[f32], n: usize, candidates: &'a mut Vec<Candidate>) -> &'a [Candidate] {
    candidates.clear();
    if n == 0 {
        return candidates;
    }
    let candidate = |(token, logit): (usize, &f32)| Candidate { token: token as u32, weight: *logit };
    candidates.extend(logits.iter().enumerate().map(candidate));
    if n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, heavier_first);
        candidates.truncate(n);
    }
    candidates.sort_unstable_by(heavier_first);
    candidates
}

/// The lowest id of the highest logit.
fn argmax(logits: &[f32]) -> u32 {
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, logit| max.max(*logit));
    logits.iter().position(|logit| *logit == max).unwrap_or(0) as u32
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits[argmax(logits) as usize]);
    max + logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum::<f64>().ln()
}

/// A number in [0, 1) for draw `n` of `seed`: two rounds of the mixer of SplitMix64 (Steele et al. 2014).
fn uniform(seed: u64, n: u32) -> f64 {
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let bits = mix(mix(seed.wrapping_add(GAMMA)).wrapping_add(GAMMA.wrapping_mul(u64::from(n) + 1)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
