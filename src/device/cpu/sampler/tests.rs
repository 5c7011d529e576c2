//! Compares the sampler with a plain formula in f64, written from the documentation of `SamplingParams`.

mod goldens;

use engine::SamplingParams;

use super::*;

const VOCAB: usize = 50;
const DRAWS: u64 = 6000;

/// A row with prompt, output so far, and settings.
fn row(prompt: &[u32], output: &[u32], sampling: &SamplingParams) -> Row {
    let mut row = Row::with_capacity(64);
    let prompt: Vec<TokenId> = prompt.iter().map(|&t| TokenId(t)).collect();
    row.join(&prompt, prompt.len() as u32, sampling);
    output.iter().for_each(|&token| row.generate(token));
    row
}

/// Random logits, a different set for each `n`.
fn random_logits(n: u64) -> Vec<f32> {
    let normal = |i: u32| (0..12).map(|j| uniform(n + 1000, i * 12 + j)).sum::<f64>() - 6.0;
    (0..VOCAB as u32).map(|i| (2.0 * normal(i)) as f32).collect()
}

fn sampled(row: &Row, num_generated: u32, logits: &[f32]) -> SampledToken {
    choose(RowId(0), row, num_generated, &mut logits.to_vec(), None)
}

/// Logits after penalties, bias and bans: one line for each rule.
fn reference_logits(prompt: &[u32], output: &[u32], p: &SamplingParams, logits: &[f32]) -> Vec<f64> {
    let all = [prompt, output].concat();
    let adjusted = |(token, &logit): (usize, &f32)| {
        let token = token as u32;
        let count = output.iter().filter(|&&t| t == token).count() as f64;
        let mut x = f64::from(logit);
        if all.contains(&token) {
            x = if x > 0.0 { x / f64::from(p.repetition_penalty) } else { x * f64::from(p.repetition_penalty) };
        }
        x -= f64::from(p.presence_penalty) * count.min(1.0) + f64::from(p.frequency_penalty) * count;
        x += p.logit_bias.iter().filter(|(t, _)| t.0 == token).map(|(_, b)| f64::from(*b)).sum::<f64>();
        let completes = |word: &Vec<TokenId>| {
            let word: Vec<u32> = word.iter().map(|t| t.0).collect();
            [all.as_slice(), &[token]].concat().ends_with(&word)
        };
        let too_early = output.len() < p.min_tokens as usize && p.end_ids.contains(&TokenId(token));
        if p.bad_words.iter().any(completes) || too_early { f64::NEG_INFINITY } else { x }
    };
    logits.iter().enumerate().map(adjusted).collect()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    logits.iter().map(|x| (x - max).exp() / total).collect()
}

/// Keeps the probabilities for which `keep` is true, and normalizes them.
fn filtered(probabilities: &[f64], keep: impl Fn(f64) -> bool) -> Vec<f64> {
    let kept: Vec<f64> = probabilities.iter().map(|&p| if keep(p) { p } else { 0.0 }).collect();
    let total: f64 = kept.iter().sum();
    kept.iter().map(|p| p / total).collect()
}

/// The distribution that tokens are drawn from.
fn reference(prompt: &[u32], output: &[u32], p: &SamplingParams, logits: &[f32]) -> Vec<f64> {
    let logits = reference_logits(prompt, output, p, logits);
    let mut probabilities = softmax(&logits.iter().map(|x| x / f64::from(p.temperature)).collect::<Vec<_>>());
    let sorted = |probabilities: &[f64]| {
        let mut sorted = probabilities.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted
    };
    if p.top_k > 0 {
        let least = sorted(&probabilities)[(p.top_k as usize).min(VOCAB) - 1];
        probabilities = filtered(&probabilities, |x| x >= least);
    }
    if p.top_p < 1.0 {
        let mut reached = 0.0;
        let sorted = sorted(&probabilities);
        let least = sorted.iter().find(|&&x| (reached += x, reached >= f64::from(p.top_p)).1);
        let least = least.copied().unwrap_or(0.0);
        probabilities = filtered(&probabilities, |x| x >= least);
    }
    let most = probabilities.iter().copied().fold(0.0, f64::max);
    filtered(&probabilities, |x| x >= f64::from(p.min_p) * most)
}

/// Draws with many seeds and positions. No draw may be outside the support, and frequencies must match `expected` by
/// Pearson's chi-square. Seeds are fixed, so the result is the same in every run; the tolerance is 5 standard
/// deviations.
fn check_frequencies(
    what: &str,
    prompt: &[u32],
    output: &[u32],
    params: &SamplingParams,
    logits: &[f32],
    expected: &[f64],
) {
    let mut counts = vec![0u32; logits.len()];
    for seed in 0..DRAWS {
        let row = row(prompt, output, &SamplingParams { seed, ..params.clone() });
        counts[sampled(&row, output.len() as u32, logits).token.0 as usize] += 1;
    }
    let (mut chi_square, mut bins, mut rare, mut rare_count) = (0.0, 0.0, 0.0, 0.0);
    for (token, (&count, &p)) in counts.iter().zip(expected).enumerate() {
        assert!(p > 0.0 || count == 0, "{what}: token {token} was drawn {count} times, but has no probability");
        let mean = p * DRAWS as f64;
        if mean >= 5.0 {
            chi_square += (f64::from(count) - mean).powi(2) / mean;
            bins += 1.0;
        } else {
            (rare, rare_count) = (rare + mean, rare_count + f64::from(count));
        }
    }
    if rare >= 5.0 {
        chi_square += (rare_count - rare).powi(2) / rare;
        bins += 1.0;
    }
    let freedom = f64::max(bins - 1.0, 1.0);
    let allowed = freedom + 5.0 * (2.0 * freedom).sqrt();
    assert!(chi_square <= allowed, "{what}: chi-square {chi_square:.1} of {bins} bins, allowed {allowed:.1}");
    assert!(bins > 1.0 || expected.iter().any(|&p| p > 0.999), "{what}: nothing was compared");
}

fn at(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, ..SamplingParams::default() }
}

/// Every rule, alone and combined.
fn settings() -> Vec<(&'static str, SamplingParams)> {
    let words = |words: &[&[u32]]| words.iter().map(|w| w.iter().map(|&t| TokenId(t)).collect()).collect::<Vec<_>>();
    let bias = vec![(TokenId(3), 2.5), (TokenId(7), -4.0), (TokenId(3), 0.5), (TokenId(VOCAB as u32 + 9), 1.0)];
    let ends = vec![TokenId(1), TokenId(40)];
    vec![
        ("temperature 1", at(1.0)),
        ("temperature 0.3", at(0.3)),
        ("temperature 3", at(3.0)),
        ("top-k", SamplingParams { top_k: 7, ..at(1.5) }),
        ("top-k beyond the vocabulary", SamplingParams { top_k: 1000, ..at(1.0) }),
        ("top-p", SamplingParams { top_p: 0.8, ..at(1.5) }),
        ("top-p that keeps one", SamplingParams { top_p: 1e-6, ..at(1.0) }),
        ("min-p", SamplingParams { min_p: 0.1, ..at(2.0) }),
        ("repetition", SamplingParams { repetition_penalty: 1.7, ..at(1.0) }),
        ("presence", SamplingParams { presence_penalty: 1.2, ..at(1.0) }),
        ("frequency", SamplingParams { frequency_penalty: 0.6, ..at(1.0) }),
        ("a negative frequency", SamplingParams { frequency_penalty: -0.4, ..at(1.0) }),
        ("bias", SamplingParams { logit_bias: bias.clone(), ..at(1.0) }),
        ("bad words", SamplingParams { bad_words: words(&[&[5], &[4, 9], &[6, 4, 11], &[9, 12]]), ..at(1.0) }),
        ("min tokens", SamplingParams { min_tokens: 5, end_ids: ends.clone(), ..at(1.0) }),
        ("min tokens reached", SamplingParams { min_tokens: 4, end_ids: ends.clone(), ..at(1.0) }),
        (
            "all at once",
            SamplingParams {
                top_k: 20,
                top_p: 0.9,
                min_p: 0.02,
                repetition_penalty: 1.3,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                min_tokens: 9,
                end_ids: ends,
                logit_bias: bias,
                bad_words: words(&[&[2], &[6, 4, 13]]),
                ..at(1.2)
            },
        ),
    ]
}

const PROMPT: [u32; 5] = [8, 2, 17, 2, 33];
const OUTPUT: [u32; 4] = [30, 6, 6, 4];

#[test]
fn tokens_are_drawn_as_often_as_the_formula_says_under_every_setting() {
    for (n, (what, params)) in settings().into_iter().enumerate() {
        let logits = random_logits(n as u64);
        let expected = reference(&PROMPT, &OUTPUT, &params, &logits);
        check_frequencies(what, &PROMPT, &OUTPUT, &params, &logits, &expected);
    }
}

#[test]
fn greedy_takes_the_likeliest_token_the_formula_leaves_under_every_setting() {
    for (what, params) in settings() {
        for n in 0..200 {
            let logits = random_logits(n);
            let greedy = SamplingParams { temperature: 0.0, ..params.clone() };
            let token = sampled(&row(&PROMPT, &OUTPUT, &greedy), OUTPUT.len() as u32, &logits).token.0;
            let expected = reference_logits(&PROMPT, &OUTPUT, &params, &logits);
            let most = expected.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let chosen = expected[token as usize];
            assert!(chosen >= most - 1e-5, "{what}: token {token} has {chosen}, the likeliest {most}");
            let top_1 = SamplingParams { top_k: 1, ..params.clone() };
            assert_eq!(sampled(&row(&PROMPT, &OUTPUT, &top_1), OUTPUT.len() as u32, &logits).token.0, token, "{what}");
        }
    }
}

#[test]
fn greedy_ties_go_to_the_lowest_id_wherever_they_lie() {
    for (low, high) in [(0, 1), (3, 48), (15, 16), (17, 33), (48, 49)] {
        let mut logits = random_logits(1);
        (logits[low], logits[high]) = (99.0, 99.0);
        assert_eq!(sampled(&row(&[1], &[], &at(0.0)), 0, &logits).token.0, low as u32);
    }
    assert_eq!(sampled(&row(&[1], &[], &at(0.0)), 0, &[-1.0; VOCAB]).token.0, 0);
}

#[test]
fn ties_at_a_threshold_are_kept() {
    let mut logits = vec![0.0; VOCAB];
    logits[10] = 4.0;
    logits[20..24].fill(3.0);
    for params in [SamplingParams { top_k: 3, ..at(1.0) }, SamplingParams { top_p: 0.5, ..at(1.0) }] {
        let expected = reference(&[1], &[], &params, &logits);
        check_frequencies("ties", &[1], &[], &params, &logits, &expected);
        let seen = (0..DRAWS)
            .map(|seed| sampled(&row(&[1], &[], &SamplingParams { seed, ..params.clone() }), 0, &logits).token.0);
        let mut seen: Vec<u32> = seen.collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [10, 20, 21, 22, 23]);
    }
}

#[test]
fn top_p_is_right_where_more_tokens_are_kept_than_are_sorted_first() {
    let logits: Vec<f32> = (0..5000).map(|i| uniform(5, i) as f32).collect();
    let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    let params = SamplingParams { top_p: 0.5, ..at(1.0) };
    let mut sorted = logits.clone();
    sorted.sort_by(highest_first);
    let mut reached = 0.0;
    let least = sorted.iter().find(|&&x| (reached += f64::from(x).exp() / total, reached >= 0.5).1).copied().unwrap();
    let mut lowest = f32::INFINITY;
    for seed in 0..4000 {
        let token = sampled(&row(&[1], &[], &SamplingParams { seed, ..params.clone() }), 0, &logits).token.0;
        lowest = lowest.min(logits[token as usize]);
    }
    // 4000 draws from about 1900 kept tokens come close to the least likely one.
    assert!(lowest >= least && lowest < least + 0.01, "the lowest logit drawn is {lowest}, the bound {least}");
}

#[test]
fn a_draw_depends_on_logits_seed_and_output_position_alone() {
    let logits = random_logits(3);
    let draw = |seed, position, prompt: &[u32], id| {
        let row = row(prompt, &[], &SamplingParams { seed, ..at(2.0) });
        choose(RowId(id), &row, position, &mut logits.clone(), None).token.0
    };
    let of = |seed| (0..40).map(|position| draw(seed, position, &[1, 2], 0)).collect::<Vec<_>>();
    assert_eq!(of(7), (0..40).map(|position| draw(7, position, &[9], 31)).collect::<Vec<_>>());
    assert_ne!(of(7), of(8));
    assert_ne!(of(7)[..20], of(7)[20..]);
    // The sequences of neighbouring seeds or positions are not shifted copies of each other.
    assert_ne!(of(7)[1..], of(8)[..39]);
    assert_ne!(of(8)[1..], of(7)[..39]);
}

#[test]
fn positions_of_one_seed_are_drawn_as_often_as_the_formula_says() {
    let (logits, params) = (random_logits(4), at(1.0));
    let expected = reference(&[1], &[], &params, &logits);
    let row = row(&[1], &[], &params);
    let mut counts = [0f64; VOCAB];
    (0..DRAWS as u32).for_each(|position| counts[sampled(&row, position, &logits).token.0 as usize] += 1.0);
    for (token, (count, p)) in counts.iter().zip(&expected).enumerate() {
        let (mean, deviation) = (p * DRAWS as f64, (p * (1.0 - p) * DRAWS as f64).sqrt());
        assert!((count - mean).abs() <= 5.0 * deviation + 1.0, "token {token}: {count}, expected {mean:.1}");
    }
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    for (what, params) in settings() {
        for n in 0..20 {
            let logits = random_logits(n);
            let params = SamplingParams { num_logprobs: Some(6), seed: n, ..params.clone() };
            let chosen = sampled(&row(&PROMPT, &OUTPUT, &params), OUTPUT.len() as u32, &logits);
            let raw = softmax(&logits.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
            let close = |token: TokenId, p: f32| (f64::from(p) - raw[token.0 as usize].ln()).abs() < 1e-5;
            assert!(close(chosen.token, chosen.logprob.unwrap()), "{what}: {chosen:?}");
            assert!(chosen.top.iter().all(|&(token, p)| close(token, p)), "{what}: {chosen:?}");
            let mut best: Vec<u32> = (0..VOCAB as u32).collect();
            best.sort_by(|a, b| raw[*b as usize].total_cmp(&raw[*a as usize]));
            assert_eq!(chosen.top.iter().map(|(token, _)| token.0).collect::<Vec<_>>(), best[..6], "{what}");
        }
    }
}

#[test]
fn reporting_log_probabilities_changes_no_token() {
    for (what, params) in settings() {
        for n in 0..50 {
            let logits = random_logits(n);
            let token = |num_logprobs| {
                let params = SamplingParams { num_logprobs, seed: n, ..params.clone() };
                sampled(&row(&PROMPT, &OUTPUT, &params), OUTPUT.len() as u32, &logits).token
            };
            assert_eq!(token(None), token(Some(0)), "{what}");
            assert_eq!(token(None), token(Some(1000)), "{what}");
        }
    }
}

#[test]
fn no_logits_make_it_panic() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let odd = [vec![nan; VOCAB], vec![-inf; VOCAB], vec![inf; VOCAB], [vec![nan, 1.0, -inf], vec![2.0; 20]].concat()];
    for logits in odd {
        for temperature in [0.0, 1.0, 1e-30, 1e30] {
            for (_, params) in settings() {
                let params = SamplingParams { temperature, num_logprobs: Some(3), ..params };
                let token = sampled(&row(&PROMPT, &OUTPUT, &params), 4, &logits).token.0;
                assert!((token as usize) < logits.len());
            }
        }
    }
}

#[test]
fn tokens_outside_of_a_mask_are_never_chosen_and_log_probabilities_stay_raw() {
    let logits: Vec<f32> = (0..70).map(|token| token as f32 / 10.0).collect();
    let mask = [1 << 3 | 1 << 9, 1 << 1];
    let masked = |sampling: SamplingParams, position| {
        let row = row(&[1], &[], &sampling);
        choose(RowId(0), &row, position, &mut logits.clone(), Some(&mask))
    };
    let greedy = masked(SamplingParams { num_logprobs: Some(1), ..SamplingParams::default() }, 0);
    assert_eq!(greedy.token, TokenId(33));
    assert_eq!(greedy.top[0].0, TokenId(69), "the likeliest tokens are those of the raw logits");
    let drawn: Vec<u32> = (0..200)
        .map(|position| masked(SamplingParams { temperature: 5.0, ..SamplingParams::default() }, position).token.0)
        .collect();
    assert!(drawn.iter().all(|token| [3, 9, 33].contains(token)));
    assert!([3, 9, 33].iter().all(|token| drawn.contains(token)));
    let short = choose(RowId(0), &row(&[1], &[], &SamplingParams::default()), 0, &mut logits.clone(), Some(&mask[..1]));
    assert_eq!(short.token, TokenId(9), "missing words allow no token");
}
