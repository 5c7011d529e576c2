//! Compares the choice of experts with the plain formula.

mod gpu;

use std::sync::Arc;

use gpu::{Random, assert_close, floats, poisoned};
use half::bf16;
use kernels::cuda::quantize_rows::{FP8_SLICE, Fp8Rows, quantize_rows};
use kernels::cuda::route_few_tokens::{
    ListedRoutes, RoundedTokens, RouterProduct, list_bytes, route_few_tokens, takes,
};
use kernels::cuda::route_tokens::{Choices, GroupScore, Groups, Router, Scoring, route_tokens};
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};
use kernels::reference::{self, Choosing};

const PADDING: u32 = u32::MAX;

/// Tokens, experts, experts of a token.
const ROUTINGS: [[usize; 3]; 6] = [[1, 4, 2], [3, 8, 2], [17, 60, 4], [64, 128, 8], [200, 512, 10], [1500, 32, 8]];

fn upload<T: bytemuck::Pod>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, values).expect("memory")
}

/// Whether roundings may change the choice: two values that it depends on are different but close.
fn is_close(logits: &[f32], choosing: &Choosing<'_>) -> bool {
    let has_close = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.windows(2).any(|pair| pair[0] != pair[1] && pair[1] - pair[0] < 4e-6)
    };
    let values = choosing.values(logits);
    has_close(choosing.group_scores(&values)) || has_close(values)
}

/// Asserts that the tokens of `slots` are routed as the formula says. Returns the number of tokens that were compared.
fn check_routes(
    (gpu, q): (&Arc<Gpu>, &Queue),
    router: &Router,
    (logits, slots): (&[f32], &[u32]),
    choosing: &Choosing<'_>,
) -> usize {
    let (tokens, count, top_k) = (slots.len(), router.count, choosing.top_k);
    let experts = poisoned::<u32>(gpu, q, tokens * top_k);
    let probabilities = poisoned::<f32>(gpu, q, tokens * top_k);
    let to = Choices { experts: experts.span(), probabilities: probabilities.span(), top_k };
    route_tokens(q, to, router, tokens).expect("a launch");
    q.wait().expect("the kernel runs");
    let experts: Vec<u32> = experts.span().read(tokens * top_k).expect("a copy");
    let found: Vec<f32> = probabilities.span().read(tokens * top_k).expect("a copy");
    let mut compared = 0;
    for token in 0..tokens {
        let own = token * top_k..(token + 1) * top_k;
        if slots[token] == PADDING {
            assert!(experts[own.clone()].iter().all(|&expert| expert == count as u32));
            assert!(found[own].iter().all(|&probability| probability == 0.0));
            continue;
        }
        let logits = &logits[token * count..][..count];
        if is_close(logits, choosing) {
            continue;
        }
        let (ids, weights): (Vec<u32>, Vec<f32>) = reference::choose_experts(logits, choosing).into_iter().unzip();
        assert_eq!(experts[own.clone()], ids, "token {token} of {tokens}, {count} experts, {choosing:?}");
        assert_close("weights", &found[own], &weights, 1e-5, 1e-7);
        compared += 1;
    }
    compared
}

#[test]
fn tokens_go_to_the_likeliest_experts_and_padding_to_none() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(1);
    for [tokens, count, top_k] in ROUTINGS {
        // Few different values, so that many are equal, also with the bias.
        let logits: Vec<f32> = (0..tokens * count).map(|_| random.below(32) as f32 * 0.125).collect();
        let slots: Vec<u32> = (0..tokens).map(|token| if token % 5 == 2 { PADDING } else { 7 }).collect();
        let bias: Vec<bf16> = (0..count).map(|expert| bf16::from_f32((expert % 3) as f32 * 0.5)).collect();
        let (logits_on, slots_on, bias_on) = (upload(&gpu, &logits), upload(&gpu, &slots), upload(&gpu, &bias));
        let biased: Vec<f32> = logits.iter().enumerate().map(|(i, logit)| logit + bias[i % count].to_f32()).collect();
        for is_normalized in [false, true] {
            let router = Router::softmax(logits_on.span(), slots_on.span(), count, is_normalized);
            let router = Router { bias: bias_on.span(), ..router };
            let choosing = Choosing::softmax(top_k, is_normalized);
            let compared = check_routes((&gpu, &q), &router, (&biased, &slots), &choosing);
            assert!(compared * 2 >= tokens, "{compared} of {tokens} tokens were compared");
        }
    }
}

#[test]
fn sigmoids_biases_and_groups_decide_the_choice_and_factors_the_weights() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(8);
    let groups = [[2, 1], [4, 2], [12, 4], [8, 4], [32, 5], [8, 4]];
    for ([tokens, count, top_k], groups) in ROUTINGS.into_iter().zip(groups) {
        // Few different values, so that many are equal.
        let logits: Vec<f32> = (0..tokens * count).map(|_| random.below(12) as f32 * 0.3 - 1.0).collect();
        let slots: Vec<u32> = (0..tokens).map(|token| if token % 5 == 2 { PADDING } else { 7 }).collect();
        // All values may be below 0.
        let bias: Vec<f32> = (0..count).map(|_| random.below(4) as f32 * 0.26 - 1.5).collect();
        let scales: Vec<f32> = (0..count).map(|_| random.unit() + 1.5).collect();
        let (logits_on, slots_on) = (upload(&gpu, &logits), upload(&gpu, &slots));
        let (bias_on, scales_on) = (upload(&gpu, &bias), upload(&gpu, &scales));
        let plain = Choosing::softmax(top_k, true);
        let sigmoid = Choosing { is_sigmoid: true, ..plain };
        let kinds = [
            Choosing { is_normalized: false, ..sigmoid },
            Choosing { selection_bias: &bias, scale: 2.5, ..sigmoid },
            Choosing { selection_bias: &bias, groups: Some(groups), ..sigmoid },
            Choosing { groups: Some(groups), is_normalized: false, scale: 0.5, scales: &scales, ..sigmoid },
            Choosing { groups: Some(groups), is_best: true, is_normalized: false, ..plain },
            Choosing { selection_bias: &bias, ..plain },
            Choosing { scales: &scales, ..plain },
        ];
        for choosing in kinds {
            let given = |values: &[f32], on: Span| if values.is_empty() { Span::NULL } else { on };
            let score = if choosing.is_best { GroupScore::Best } else { GroupScore::BestTwo };
            let router = Router {
                selection_bias: given(choosing.selection_bias, bias_on.span()),
                scales: given(choosing.scales, scales_on.span()),
                scoring: if choosing.is_sigmoid { Scoring::Sigmoid } else { Scoring::Softmax },
                groups: choosing.groups.map(|[count, chosen]| Groups { count, chosen, score }),
                scale: choosing.scale,
                ..Router::softmax(logits_on.span(), slots_on.span(), count, choosing.is_normalized)
            };
            let compared = check_routes((&gpu, &q), &router, (&logits, &slots), &choosing);
            assert!(compared * 2 >= tokens, "{compared} of {tokens} tokens were compared, {choosing:?}");
        }
    }
}

#[test]
fn sparse_mixer_weights_an_expert_among_those_near_it_that_were_not_chosen() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(9);
    for ([tokens, count, top_k], tolerance) in ROUTINGS.into_iter().zip([0.02, 0.26, 0.26, 0.26, 1.1, 0.02]) {
        // Few different values, below and above 0. None of their differences is at the limit.
        let logits: Vec<f32> = (0..tokens * count).map(|_| random.below(32) as f32 * 0.125 - 2.0).collect();
        let slots: Vec<u32> = (0..tokens).map(|token| if token % 5 == 2 { PADDING } else { 7 }).collect();
        let (logits_on, slots_on) = (upload(&gpu, &logits), upload(&gpu, &slots));
        for is_normalized in [false, true] {
            let router = Router {
                scoring: Scoring::SparseMixer { tolerance },
                ..Router::softmax(logits_on.span(), slots_on.span(), count, is_normalized)
            };
            let choosing = Choosing { sparse_tolerance: Some(tolerance), ..Choosing::softmax(top_k, is_normalized) };
            let compared = check_routes((&gpu, &q), &router, (&logits, &slots), &choosing);
            assert!(compared * 2 >= tokens, "{compared} of {tokens} tokens were compared");
        }
    }
}

/// Tokens, experts, experts of a token, inputs of the router, and whether there is a gate.
const FEW: [([usize; 4], bool); 9] = [
    ([1, 4, 2, 8], false),
    ([1, 256, 8, 2048], true),
    ([2, 128, 8, 2048], false),
    ([3, 16, 2, 264], true),
    ([5, 60, 4, 2056], true),
    ([6, 72, 6, 5120], false),
    ([7, 512, 10, 2048], true),
    ([8, 128, 8, 7168], false),
    ([8, 384, 32, 2880], true),
];

/// The routes of few tokens, as the kernel wrote them.
struct FewRoutes {
    choices: Vec<(u32, f32)>, // [tokens, top_k]
    places: Vec<u32>,
    list: Vec<[u32; 4]>,
}

impl FewRoutes {
    /// Asserts that the routes to experts `own` are in order, and that these experts are listed.
    fn check_order(&self, own: std::ops::Range<usize>, [tokens, top_k]: [usize; 2]) {
        let expert_of = |route: usize| self.choices[route].0 as usize;
        let mut routes: Vec<usize> = (0..tokens * top_k).filter(|&route| own.contains(&expert_of(route))).collect();
        routes.sort_by_key(|&route| (expert_of(route), route));
        for (row, &route) in routes.iter().enumerate() {
            assert_eq!(self.places[route] as usize, row, "the place of route {route}");
        }
        let mut listed = Vec::new();
        for expert in own.clone() {
            let of_expert = routes.iter().filter(|&&route| expert_of(route) == expert);
            let bits = of_expert.fold(0, |bits, route| bits | 1u32 << (route / top_k));
            if bits != 0 {
                let first = routes.iter().filter(|&&route| expert_of(route) < expert).count();
                listed.push([(expert - own.start) as u32, first as u32, bits, 0]);
            }
        }
        assert_eq!(self.list[0][0] as usize, listed.len(), "listed experts");
        assert_eq!(self.list[1..=listed.len()], listed);
    }
}

#[test]
fn few_tokens_choose_by_the_product_of_the_router_and_their_experts_are_listed() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(7);
    let mut compared = 0;
    for ([tokens, count, top_k, width], has_gate) in FEW {
        if !takes(&gpu, tokens, top_k, count) {
            println!("skipped: the kernel needs a GPU of compute capability 9");
            return;
        }
        let (routes, cols) = (tokens * top_k, 136);
        let slots: Vec<u32> = (0..tokens).map(|token| if token % 5 == 2 { PADDING } else { 7 }).collect();
        let [routed, weight] = [tokens, count].map(|rows| random.bf16s(rows * width, 0.1));
        let (gate, x) = (random.bf16s(width, 0.1), random.bf16s(tokens * cols, 1.0));
        let slots_on = upload(&gpu, &slots);
        let [routed_on, weight_on, gate_on, x_on] = [&routed, &weight, &gate, &x].map(|values| upload(&gpu, values));
        let bias: Vec<f32> = (0..count).map(|_| random.unit()).collect();
        let bias_on = upload(&gpu, &bias);
        let factors = poisoned::<f32>(&gpu, &q, tokens);
        let logits = reference::linear(&floats(&routed), &floats(&weight), None, width);
        let own = count / 4..count / 4 + count / 2;
        let rounded = poisoned::<u8>(&gpu, &q, Fp8Rows::bytes(tokens, cols));
        let rounded = Fp8Rows::in_buffer(rounded.span(), tokens, cols);
        let run = |router: &Router, rounds: bool| {
            let words = |count: usize| poisoned::<u32>(&gpu, &q, count);
            let [experts, probabilities, places] = std::array::from_fn(|_| words(routes));
            let list = words(list_bytes(routes) / 4);
            let choices = Choices { experts: experts.span(), probabilities: probabilities.span(), top_k };
            let to = ListedRoutes {
                list: list.span(),
                places: places.span(),
                first_expert: own.start,
                num_experts: own.len(),
            };
            let gate = has_gate.then(|| [gate_on.span(), factors.span()]);
            let product = RouterProduct { x: routed_on.span(), weight: weight_on.span(), width, gate };
            let to_round = rounds.then_some(RoundedTokens { x: x_on.span(), cols, to: rounded });
            route_few_tokens(&q, to, choices, router, product, tokens, to_round).expect("a launch");
            q.wait().expect("the kernel runs");
            let read = |buffer: &DeviceBuffer| buffer.span().read::<u32>(routes).expect("a copy");
            let weights = read(&probabilities).into_iter().map(f32::from_bits);
            FewRoutes {
                choices: read(&experts).into_iter().zip(weights).collect(),
                places: read(&places),
                list: list.span().read(1 + routes).expect("a copy"),
            }
        };
        let softmax = Router::softmax(Span::NULL, slots_on.span(), count, true);
        let groups = Groups { count: 2, chosen: 1, score: GroupScore::BestTwo };
        let sigmoid = Router {
            selection_bias: bias_on.span(),
            scales: bias_on.span(),
            scoring: Scoring::Sigmoid,
            groups: Some(groups),
            ..softmax
        };
        let sparse = Router { scoring: Scoring::SparseMixer { tolerance: 0.3 }, ..softmax };
        let plain = Choosing::softmax(top_k, true);
        let grouped =
            Choosing { is_sigmoid: true, selection_bias: &bias, scales: &bias, groups: Some([2, 1]), ..plain };
        let mixed = Choosing { sparse_tolerance: Some(0.3), ..plain };
        for (router, choosing) in [(softmax, plain), (sigmoid, grouped), (sparse, mixed)] {
            let what = format!("{tokens} tokens, {top_k} of {count} experts, {width} inputs, {choosing:?}");
            let found = run(&router, false);
            for token in 0..tokens {
                let own = &found.choices[token * top_k..][..top_k];
                if slots[token] == PADDING {
                    assert!(own.iter().all(|&(expert, weight)| expert == count as u32 && weight == 0.0), "{what}");
                    continue;
                }
                let logits = &logits[token * count..][..count];
                if is_close(logits, &choosing) {
                    continue;
                }
                let (ids, expected): (Vec<u32>, Vec<f32>) =
                    reference::choose_experts(logits, &choosing).into_iter().unzip();
                let (own_ids, weights): (Vec<u32>, Vec<f32>) = own.iter().copied().unzip();
                assert_eq!(own_ids, ids, "token {token}, {what}");
                assert_close(&what, &weights, &expected, 1e-4, 1e-6);
                compared += 1;
            }
            found.check_order(own.clone(), [tokens, top_k]);
        }
        if gpu.has_kernel("quantize_rows_fp8") {
            let read = || {
                let codes: Vec<u8> = rounded.codes.read(tokens * 2 * FP8_SLICE).expect("a copy");
                let scales: Vec<f32> = rounded.scales.read(rounded.scales.bytes() / 4).expect("a copy");
                let pitch = scales.len() / 2;
                (codes, scales[..tokens].to_vec(), scales[pitch..pitch + tokens].to_vec())
            };
            run(&softmax, true);
            let at_once = read();
            quantize_rows(&q, rounded, x_on.span(), tokens, cols).expect("a launch");
            q.wait().expect("the kernel runs");
            assert!(at_once == read(), "{tokens} tokens in e4m3");
        }
        if has_gate {
            let found: Vec<f32> = factors.span().read(tokens).expect("a copy");
            let expected = reference::linear(&floats(&routed), &floats(&gate), None, width);
            let expected: Vec<f32> = expected.iter().map(|dot| 1.0 / (1.0 + (-dot).exp())).collect();
            assert_close("factors", &found, &expected, 1e-5, 1e-6);
        }
    }
    assert!(compared >= 30, "{compared} choices were compared");
}
