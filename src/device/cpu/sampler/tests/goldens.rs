//! Compares the sampler with the logits processors of transformers on random logits
//! (`scripts/goldens/make_sampling_goldens.py`).

use serde_json::Value;

use super::*;

/// The tokens that all cases share.
struct Sequence {
    prompt: Vec<u32>,
    output: Vec<u32>,
    end_ids: Vec<TokenId>,
}

struct Golden {
    what: String,
    params: SamplingParams,
    logits: Vec<f32>,
    /// After all processors; `None` if a token cannot be chosen.
    scores: Vec<Option<f64>>,
    log_probs: Vec<f64>,
}

impl Golden {
    /// Softmax of the scores.
    fn distribution(&self) -> Vec<f64> {
        softmax(&self.scores.iter().map(|score| score.unwrap_or(f64::NEG_INFINITY)).collect::<Vec<_>>())
    }
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn params(settings: &Value, end_ids: &[TokenId]) -> SamplingParams {
    let float = |name: &str, default: f32| settings.get(name).map_or(default, |value| value.as_f64().unwrap() as f32);
    let count = |name: &str| settings.get(name).map_or(0, |value| value.as_u64().unwrap() as u32);
    let list = |name: &str| settings.get(name).map_or(vec![], |value| value.as_array().unwrap().clone());
    SamplingParams {
        temperature: float("temperature", 1.0),
        top_k: count("top_k"),
        top_p: float("top_p", 1.0),
        min_p: float("min_p", 0.0),
        repetition_penalty: float("repetition_penalty", 1.0),
        min_tokens: count("min_tokens"),
        end_ids: end_ids.to_vec(),
        logit_bias: list("logit_bias")
            .iter()
            .map(|pair| (TokenId(pair[0].as_u64().unwrap() as u32), pair[1].as_f64().unwrap() as f32))
            .collect(),
        bad_words: list("bad_words").iter().map(|word| tokens(word).into_iter().map(TokenId).collect()).collect(),
        ..SamplingParams::default()
    }
}

fn goldens() -> (Sequence, Vec<Golden>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/goldens/sampling.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let shared = lines.next().unwrap();
    let end_ids: Vec<TokenId> = tokens(&shared["end_ids"]).into_iter().map(TokenId).collect();
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(Value::as_f64).collect::<Vec<Option<f64>>>();
    let golden = |line: Value| Golden {
        what: line["settings"].to_string(),
        params: params(&line["settings"], &end_ids),
        logits: numbers(&line["logits"]).into_iter().map(|logit| logit.unwrap() as f32).collect(),
        scores: numbers(&line["scores"]),
        log_probs: numbers(&line["log_probs"]).into_iter().map(Option::unwrap).collect(),
    };
    let all: Vec<Golden> = lines.map(golden).collect();
    assert!(all.len() >= 20, "{} goldens", all.len());
    let shared = Sequence { prompt: tokens(&shared["prompt"]), output: tokens(&shared["output"]), end_ids };
    (shared, all)
}

#[test]
fn kept_tokens_and_their_probabilities_are_those_of_transformers() {
    let (Sequence { prompt, output, .. }, goldens) = goldens();
    for golden in goldens.iter().filter(|golden| !golden.params.is_greedy()) {
        let row = row(&prompt, &output, &golden.params);
        let (mut logits, mut scratch) = (golden.logits.clone(), Scratch::default());
        adjust(&row, output.len() as u32, &mut logits);
        keep(&row, &logits, logits[argmax(&logits) as usize], &mut scratch);
        let total: f64 = scratch.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
        let mut found = vec![0.0; logits.len()];
        scratch.candidates.iter().for_each(|c| found[c.token as usize] = f64::from(c.weight) / total);
        for (token, (found, expected)) in found.iter().zip(golden.distribution()).enumerate() {
            let near = (found - expected).abs() < 2e-6 && (*found > 0.0) == golden.scores[token].is_some();
            assert!(near, "{}: token {token} has {found}, expected {expected}", golden.what);
        }
    }
}

#[test]
fn tokens_are_drawn_as_often_as_transformers_scores_say() {
    let (Sequence { prompt, output, .. }, goldens) = goldens();
    for golden in &goldens {
        let expected = golden.distribution();
        check_frequencies(&golden.what, &prompt, &output, &golden.params, &golden.logits, &expected);
    }
}

#[test]
fn greedy_tokens_are_the_likeliest_after_transformers_processors() {
    let (Sequence { prompt, output, end_ids }, goldens) = goldens();
    assert!(!end_ids.is_empty());
    for golden in &goldens {
        let greedy = SamplingParams { temperature: 0.0, ..golden.params.clone() };
        let token = sampled(&row(&prompt, &output, &greedy), output.len() as u32, &golden.logits).token.0;
        let score = |token: usize| golden.scores[token].unwrap_or(f64::NEG_INFINITY);
        let best = (0..golden.scores.len()).max_by(|&a, &b| score(a).total_cmp(&score(b))).unwrap();
        assert_eq!(token as usize, best, "{}", golden.what);
    }
}

#[test]
fn log_probabilities_are_those_of_torch() {
    let (Sequence { prompt, output, .. }, goldens) = goldens();
    for golden in &goldens {
        let params = SamplingParams { num_logprobs: Some(8), ..golden.params.clone() };
        let chosen = sampled(&row(&prompt, &output, &params), output.len() as u32, &golden.logits);
        let all = [(chosen.token, chosen.logprob.unwrap())].into_iter().chain(chosen.top);
        for (token, found) in all {
            let expected = golden.log_probs[token.0 as usize];
            assert!((f64::from(found) - expected).abs() < 1e-5, "{}: {found}, expected {expected}", golden.what);
        }
    }
}
