//! Mixtures of experts: routes tokens, computes the experts that at least one token chose, and sums in the order of the
//! experts, so that a token's sum does not depend on what else is in the step.

use kernels::cpu::{self as k, Buffer, Matrix, WeightType};
use ops::{DeviceError, ExpertGroups, ExpertSlices, GroupScore, Routing, Scoring};

use super::linear::Linear;
use super::{CpuDevice, CpuTensor, gate};
use crate::slices;

/// The experts of a layer that this worker has, and its part of each.
pub struct Experts {
    router: Linear, // [experts of all workers, E] f32
    first: usize,
    experts: Vec<Expert>,
    routing: Routing,
    is_gated: bool,
    selection_bias: Vec<f32>, // [experts], or none
    scales: Vec<f32>,         // [experts], or none
}

struct Expert {
    gate_up: Linear, // [2 I, E], without gates [I, E]
    down: Linear,    // [E, I]
}

/// Buffers for the tokens of one expert; as large as the largest layer needs.
#[derive(Default)]
pub(crate) struct ExpertBuffers {
    logits: Vec<f32>,  // [T, experts]
    x: Vec<f32>,       // [T, E]
    gate_up: Vec<f32>, // [T, 2 I]
    inner: Vec<f32>,   // [T, I]
    out: Vec<f32>,     // [T, E]
}

impl ExpertBuffers {
    /// Columns of the buffers of a layer with `count` experts, `hidden` wide, whose inner layers have `inner` columns.
    pub(crate) fn cols(count: usize, hidden: usize, inner: usize) -> usize {
        count + 2 * hidden + 3 * inner
    }

    fn fit(&mut self, tokens: usize, count: usize, hidden: usize, inner: usize) {
        let sizes = [
            (&mut self.logits, count),
            (&mut self.x, hidden),
            (&mut self.gate_up, 2 * inner),
            (&mut self.inner, inner),
            (&mut self.out, hidden),
        ];
        for (buffer, cols) in sizes {
            if buffer.len() < tokens * cols {
                buffer.resize(tokens * cols, 0.0);
            }
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let buffers = [&self.logits, &self.x, &self.gate_up, &self.inner, &self.out];
        buffers.into_iter().map(|buffer| buffer.len() * size_of::<f32>()).sum()
    }
}

/// A token that goes to an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Route {
    expert: usize,
    token: usize,
    probability: f32,
}

impl CpuDevice {
    pub(super) fn load_expert_layer(&mut self, layer: &ExpertSlices<'_>) -> Result<Experts, DeviceError> {
        let (count, hidden) = (layer.router.rows.len(), layer.router.cols.len());
        let inner = layer.experts.first().map_or(0, |expert| expert.down.cols.len());
        // The router is computed in f32 whatever the checkpoint's type is.
        let router = slices::matrix(&mut self.pool, std::slice::from_ref(&layer.router), &[])?;
        let mut exact = Matrix::new(WeightType::F32, hidden);
        exact.stack(as_f32(&router), count, hidden * size_of::<f32>());
        if let Some(bias) = &layer.router_bias {
            exact.set_bias(slices::vector(bias)?);
        }
        let router = Linear::Plain(exact);
        let vectors = layer.experts.iter().flat_map(|expert| expert.gate_up_bias.iter().chain(&expert.down_bias));
        let bias_elements: usize = vectors.chain(&layer.router_bias).map(|vector| vector.cols.len()).sum();
        self.weights_bytes += (router.bytes() + bias_elements * size_of::<f32>()) as u64;
        self.projection.fit(&router);
        let mut experts = Vec::with_capacity(count);
        for expert in &layer.experts {
            let gate_up = slices::matrix(&mut self.pool, &expert.gate_up, &expert.gate_up_bias)?;
            let down = slices::matrix(&mut self.pool, std::slice::from_ref(&expert.down), expert.down_bias.as_slice())?;
            experts.push(Expert { gate_up: self.add_linear(gate_up, false), down: self.add_linear(down, false) });
        }
        self.expert_buffers.fit(self.config.limits.max_tokens, count, layer.width(), inner);
        let scales = layer.scales.as_ref().map(slices::vector).transpose()?.unwrap_or_default();
        let selection_bias = layer.selection_bias.as_ref().map(slices::vector).transpose()?.unwrap_or_default();
        self.weights_bytes += (size_of_val(&*scales) + size_of_val(&*selection_bias)) as u64;
        let (first, routing, is_gated) = (layer.first, layer.routing, layer.is_gated());
        Ok(Experts { router, first, experts, routing, is_gated, selection_bias, scales })
    }

    pub(super) fn run_experts(&mut self, out: &mut CpuTensor, x: &CpuTensor, routed: &CpuTensor, layer: &Experts) {
        let (tokens, width, count) = (self.num_tokens(), x.cols, layer.router.rows());
        let (out, x, routed) = (out.rows_mut(tokens), x.rows(tokens), routed.rows(tokens));
        let b = &mut self.expert_buffers;
        let (pool, projection, isa) = (&mut self.pool, &mut self.projection, self.isa);
        projection.project(pool, isa, &mut b.logits, routed, tokens, &layer.router);
        let mut routes = routes(&b.logits[..tokens * count], count, layer.routing, &layer.selection_bias);
        for route in &mut routes {
            route.probability *= layer.scales.get(route.expert).copied().unwrap_or(1.0);
        }
        out.fill(0.0);
        for own in routes.chunk_by(|a, b| a.expert == b.expert) {
            // Experts of other workers are left to them.
            let local = own[0].expert.checked_sub(layer.first).and_then(|index| layer.experts.get(index));
            let (Some(expert), rows) = (local, own.len()) else { continue };
            let scales_input = layer.routing.scales_input;
            for (to, route) in b.x.chunks_exact_mut(width).zip(own) {
                let factor = if scales_input { route.probability } else { 1.0 };
                to.iter_mut().zip(&x[route.token * width..]).for_each(|(to, x)| *to = factor * x);
            }
            let (x, activation) = (&b.x[..rows * width], gate(layer.routing.activation));
            let inner = expert.gate_up.rows() / if layer.is_gated { 2 } else { 1 };
            let products = &mut b.inner[..rows * inner];
            if layer.is_gated {
                let outs = [products, &mut b.gate_up[..rows * 2 * inner]];
                projection.project_gated(pool, isa, outs, x, rows, (&expert.gate_up, activation));
            } else {
                projection.project(pool, isa, products, x, rows, &expert.gate_up);
                k::activate(pool, products, activation);
            }
            projection.project(pool, isa, &mut b.out, &b.inner[..rows * inner], rows, &expert.down);
            for (from, route) in b.out.chunks_exact(width).zip(own) {
                let to = &mut out[route.token * width..][..width];
                let factor = if scales_input { 1.0 } else { route.probability };
                to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
            }
        }
    }

    /// `out[t, :] *= sigmoid(x[t, :] · gate)`.
    pub(super) fn run_gate_rows(&mut self, out: &mut CpuTensor, x: &CpuTensor, gate: &Linear) {
        let (tokens, width) = (self.num_tokens(), out.cols);
        let mut gates = vec![0.0; tokens];
        self.projection.project(&mut self.pool, self.isa, &mut gates, x.rows(tokens), tokens, gate);
        for (row, gate) in out.rows_mut(tokens).chunks_exact_mut(width).zip(gates) {
            let factor = 1.0 / (1.0 + k::exp(-gate));
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

fn as_f32(matrix: &Matrix) -> Vec<u8> {
    let mut row = Buffer::new(matrix.cols());
    let mut bytes = Vec::with_capacity(matrix.rows() * matrix.cols() * size_of::<f32>());
    for index in 0..matrix.rows() {
        matrix.read_row(index, &mut row);
        bytes.extend_from_slice(bytemuck::cast_slice(&row));
    }
    bytes
}

/// The values by which experts are chosen for a token: their weights, or their products where weights follow from the choice.
fn score(weights: &mut [f32], logits: &[f32], scoring: Scoring) {
    match scoring {
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().zip(logits).for_each(|(weight, logit)| *weight = k::exp(logit - max));
            let total: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= total);
        }
        Scoring::Sigmoid => {
            weights.iter_mut().zip(logits).for_each(|(weight, logit)| *weight = 1.0 / (1.0 + k::exp(-logit)));
        }
        Scoring::SparseMixer { .. } => weights.copy_from_slice(logits),
    }
}

/// The share of the product `values[expert]`, the largest one, in the softmax over those that are near it. Those of experts that were
/// chosen before are negative infinity.
fn share_of_near(values: &[f32], expert: usize, tolerance: f32) -> f32 {
    let max = values[expert];
    let is_near = |value: &f32| max - value <= tolerance * value.abs().max(max);
    let near = values.iter().filter(|value| value.is_finite() && is_near(value));
    1.0 / near.map(|value| k::exp(value - max)).sum::<f32>()
}

/// The index of the largest value, the lowest of those that are equal. `max_by` would take the last.
fn largest(values: &[f32]) -> usize {
    (1..values.len()).fold(0, |best, next| if values[next] > values[best] { next } else { best })
}

/// Sets the values of all groups that are not chosen to negative infinity.
fn keep_groups(values: &mut [f32], groups: ExpertGroups) {
    let size = values.len() / groups.count;
    let score = |group: &[f32]| {
        let first = largest(group);
        if groups.score == GroupScore::Best {
            return group[first];
        }
        let others = group.iter().enumerate().filter(|(index, _)| *index != first);
        group[first] + others.map(|(_, &value)| value).fold(f32::NEG_INFINITY, f32::max)
    };
    let mut scores: Vec<f32> = values.chunks_exact(size).map(score).collect();
    let mut is_chosen = vec![false; groups.count];
    for _ in 0..groups.chosen {
        let best = largest(&scores);
        (is_chosen[best], scores[best]) = (true, f32::NEG_INFINITY);
    }
    for (group, _) in values.chunks_exact_mut(size).zip(is_chosen).filter(|(_, is_chosen)| !is_chosen) {
        group.fill(f32::NEG_INFINITY);
    }
}

/// The routes of all tokens, by expert, then by token. `logits` `[T, count]`; `selection_bias` `[count]` or empty.
fn routes(logits: &[f32], count: usize, routing: Routing, selection_bias: &[f32]) -> Vec<Route> {
    let mut routes = Vec::with_capacity(logits.len() / count * routing.top_k);
    let mut probabilities = vec![0.0; count];
    let mut values = vec![0.0; count];
    for (token, logits) in logits.chunks_exact(count).enumerate() {
        score(&mut probabilities, logits, routing.scoring);
        values.copy_from_slice(&probabilities);
        values.iter_mut().zip(selection_bias).for_each(|(value, bias)| *value += bias);
        if let Some(groups) = routing.groups {
            keep_groups(&mut values, groups);
        }
        let first = routes.len();
        for _ in 0..routing.top_k {
            let expert = largest(&values);
            let probability = match routing.scoring {
                Scoring::SparseMixer { tolerance } => share_of_near(&values, expert, tolerance),
                Scoring::Softmax | Scoring::Sigmoid => probabilities[expert],
            };
            routes.push(Route { expert, token, probability });
            values[expert] = f32::NEG_INFINITY;
        }
        let own = &mut routes[first..];
        // Sigmoids can all be 0.
        let sum = own.iter().map(|route| route.probability).sum::<f32>() + 1e-20;
        let divisor = if routing.is_normalized { sum } else { 1.0 };
        own.iter_mut().for_each(|route| route.probability = route.probability / divisor * routing.scale);
    }
    routes.sort_unstable_by_key(|route| (route.expert, route.token));
    routes
}

#[cfg(test)]
mod tests {
    use ops::Activation;

    use super::*;

    const USUAL: Routing = Routing {
        top_k: 2,
        scoring: Scoring::Softmax,
        scales_input: false,
        groups: None,
        is_normalized: false,
        scale: 1.0,
        activation: Activation::Silu,
    };

    #[test]
    fn a_token_goes_to_the_likeliest_experts_and_to_the_lower_of_equals() {
        let third = 1.0 / 3.0;
        let logits = [0.0, 2f32.ln(), 0.0, 1.0, 1.0, 1.0];
        let found = routes(&logits, 3, USUAL, &[]);
        let expected = [(0, 0, 0.25), (0, 1, third), (1, 0, 0.5), (1, 1, third)];
        for (route, (expert, token, probability)) in found.iter().zip(expected) {
            assert_eq!((route.expert, route.token), (expert, token));
            assert!((route.probability - probability).abs() < 1e-6);
        }
        let normalized = routes(&logits, 3, Routing { is_normalized: true, ..USUAL }, &[]);
        assert!((normalized[2].probability - 2.0 * third).abs() < 1e-6, "{normalized:?}");
        let sigmoid = routes(&logits[..3], 3, Routing { scoring: Scoring::Sigmoid, ..USUAL }, &[]);
        let found: Vec<_> = sigmoid.iter().map(|route| (route.expert, route.probability)).collect();
        assert!(found[0] == (0, 0.5) && found[1].0 == 1 && (found[1].1 - 2.0 / 3.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn sparse_mixer_weights_an_expert_among_those_near_it_that_were_not_chosen() {
        let routing = Routing { scoring: Scoring::SparseMixer { tolerance: 0.5 }, ..USUAL };
        let found = |logits: &[f32]| -> Vec<_> {
            routes(logits, logits.len(), routing, &[]).iter().map(|route| (route.expert, route.probability)).collect()
        };
        let expect = |found: Vec<(usize, f32)>, expected: [(usize, f32); 2]| {
            for (found, (expert, weight)) in found.iter().zip(expected) {
                assert!(found.0 == expert && (found.1 - weight).abs() < 1e-6, "{found:?}, not {expected:?}");
            }
        };
        // The first is alone, the second has 1.5 and 1.0 near it.
        let second = 1.0 / (1.0 + (-0.5f32).exp() + (-1f32).exp());
        expect(found(&[0.5, 1.5, 1.0, 5.0, 2.0]), [(3, 1.0), (4, second)]);
        // Below 0, the size of the smaller product counts.
        let first = 1.0 / (1.0 + (-1f32).exp());
        expect(found(&[-2.0, -1.0, -5.0]), [(0, 1.0), (1, first)]);
    }

    #[test]
    fn a_bias_and_groups_decide_which_experts_are_chosen_but_not_their_weights() {
        let routing = Routing { scoring: Scoring::Sigmoid, scale: 2.0, ..USUAL };
        let chosen = |routing, bias: &[f32]| -> Vec<_> {
            let routes = routes(&[0.0, 3.0, 1.0, 1.0, 2.0, -9.0], 6, routing, bias);
            routes.iter().map(|route| (route.expert, route.probability)).collect()
        };
        let weight = |logit: f32| 2.0 / (1.0 + (-logit).exp());
        let expect = |found: Vec<(usize, f32)>, expected: [(usize, f32); 2]| {
            for (found, (expert, logit)) in found.iter().zip(expected) {
                assert!(found.0 == expert && (found.1 - weight(logit)).abs() < 1e-6, "{found:?}, not {expected:?}");
            }
            assert_eq!(found.len(), 2);
        };
        expect(chosen(routing, &[]), [(1, 3.0), (4, 2.0)]);
        expect(chosen(routing, &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]), [(1, 3.0), (5, -9.0)]);
        // The group of experts 2 and 3 has the largest sum of two, although it has neither of the best experts.
        let groups = Some(ExpertGroups { count: 3, chosen: 1, score: GroupScore::BestTwo });
        expect(chosen(Routing { groups, ..routing }, &[0.0, -0.1, 0.0, 0.1, 0.0, 0.0]), [(2, 1.0), (3, 1.0)]);
        let best = Some(ExpertGroups { count: 3, chosen: 1, score: GroupScore::Best });
        expect(chosen(Routing { groups: best, ..routing }, &[]), [(0, 0.0), (1, 3.0)]);
        // All values of chosen groups may be below 0.
        expect(chosen(Routing { groups, ..routing }, &[-9.0, -9.0, -8.0, -8.0, -9.0, -9.0]), [(2, 1.0), (3, 1.0)]);
    }
}
