//! Mixtures of experts: routes tokens, computes the experts that at least one token chose, and sums in the order of the
//! experts, so that a token's sum does not depend on what else is in the step.

use kernels::cpu::{self as k, Buffer, Matrix, WeightType};
use ops::{DeviceError, ExpertSlices, Routing};

use super::linear::Linear;
use super::{CpuDevice, CpuTensor, gate, weights};

/// The experts of a layer, this worker's part of each.
pub struct Experts {
    router: Linear, // [experts, E] f32
    experts: Vec<Expert>,
    routing: Routing,
}

struct Expert {
    gate_up: Linear, // [2 I, E]
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
    pub(super) fn load_expert_layer(&mut self, slices: &ExpertSlices<'_>) -> Result<Experts, DeviceError> {
        let (count, hidden) = (slices.experts.len(), slices.router.cols.len());
        let inner = slices.experts.first().map_or(0, |expert| expert.down.cols.len());
        // The router is computed in f32 whatever the checkpoint's type is.
        let router = weights::matrix(std::slice::from_ref(&slices.router), &[])?;
        let mut exact = Matrix::new(WeightType::F32, hidden);
        exact.stack(as_f32(&router).leak(), count, hidden * size_of::<f32>());
        let router = Linear::Plain(exact);
        self.weights_bytes += router.bytes() as u64;
        self.projection.fit(&router);
        let mut experts = Vec::with_capacity(count);
        for expert in &slices.experts {
            let gate_up = weights::matrix(&expert.gate_up, &[])?;
            let down = weights::matrix(std::slice::from_ref(&expert.down), &[])?;
            experts.push(Expert { gate_up: self.add_linear(gate_up, false), down: self.add_linear(down, false) });
        }
        self.expert_buffers.fit(self.config.limits.max_tokens, count, hidden, inner);
        Ok(Experts { router, experts, routing: slices.routing })
    }

    pub(super) fn run_experts(&mut self, out: &mut CpuTensor, x: &CpuTensor, layer: &Experts) {
        let (tokens, width, count) = (self.num_tokens(), x.cols, layer.experts.len());
        let (out, x, b) = (out.rows_mut(tokens), x.rows(tokens), &mut self.expert_buffers);
        let (pool, projection, isa) = (&mut self.pool, &mut self.projection, self.isa);
        projection.project(pool, isa, &mut b.logits, x, tokens, &layer.router);
        let routes = routes(&b.logits[..tokens * count], count, layer.routing);
        out.fill(0.0);
        for own in routes.chunk_by(|a, b| a.expert == b.expert) {
            let (expert, rows) = (&layer.experts[own[0].expert], own.len());
            for (to, route) in b.x.chunks_exact_mut(width).zip(own) {
                to.copy_from_slice(&x[route.token * width..][..width]);
            }
            let by = (&expert.gate_up, gate(layer.routing.activation));
            let inner = expert.gate_up.rows() / 2;
            let outs = [&mut b.inner[..rows * inner], &mut b.gate_up[..rows * 2 * inner]];
            projection.project_gated(pool, isa, outs, &b.x[..rows * width], rows, by);
            projection.project(pool, isa, &mut b.out, &b.inner[..rows * inner], rows, &expert.down);
            for (from, route) in b.out.chunks_exact(width).zip(own) {
                let to = &mut out[route.token * width..][..width];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += route.probability * from);
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

/// The routes of all tokens, by expert, then by token. `logits` `[T, count]`.
fn routes(logits: &[f32], count: usize, routing: Routing) -> Vec<Route> {
    let mut routes = Vec::with_capacity(logits.len() / count * routing.top_k);
    let mut probabilities = vec![0.0; count];
    for (token, logits) in logits.chunks_exact(count).enumerate() {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for (probability, logit) in probabilities.iter_mut().zip(logits) {
            *probability = k::exp(logit - max);
        }
        let total: f32 = probabilities.iter().sum();
        let first = routes.len();
        for _ in 0..routing.top_k {
            // The first of the largest: `max_by` would take the last.
            let likeliest =
                |best: usize, next: usize| if probabilities[next] > probabilities[best] { next } else { best };
            let expert = (1..count).fold(0, likeliest);
            routes.push(Route { expert, token, probability: probabilities[expert] / total });
            probabilities[expert] = -1.0;
        }
        if routing.is_normalized {
            let own = &mut routes[first..];
            let sum: f32 = own.iter().map(|route| route.probability).sum();
            own.iter_mut().for_each(|route| route.probability /= sum);
        }
    }
    routes.sort_unstable_by_key(|route| (route.expert, route.token));
    routes
}

#[cfg(test)]
mod tests {
    use ops::Activation;

    use super::*;

    #[test]
    fn a_token_goes_to_the_likeliest_experts_and_to_the_lower_of_equals() {
        let routing = Routing { top_k: 2, is_normalized: false, activation: Activation::Silu };
        let third = 1.0 / 3.0;
        let logits = [0.0, 2f32.ln(), 0.0, 1.0, 1.0, 1.0];
        let found = routes(&logits, 3, routing);
        let expected = [(0, 0, 0.25), (0, 1, third), (1, 0, 0.5), (1, 1, third)];
        for (route, (expert, token, probability)) in found.iter().zip(expected) {
            assert_eq!((route.expert, route.token), (expert, token));
            assert!((route.probability - probability).abs() < 1e-6);
        }
        let normalized = routes(&logits, 3, Routing { is_normalized: true, ..routing });
        assert!((normalized[2].probability - 2.0 * third).abs() < 1e-6, "{normalized:?}");
    }
}
