//! Adapters: low-rank products in f32 beside linear layers, row by row, so that a row's sums do not depend on the others.

use std::sync::Mutex;

use kernels::cpu::Pool;
use ops::{LowRankPart, NO_ADAPTER, StepInputs};

use super::weights::CpuWeight;

/// Number of partial sums of a dot product, added in a fixed order at the end.
const LANES: usize = 16;

/// The products of each slot in each linear layer.
#[derive(Default)]
pub(super) struct Adapters {
    /// `[layers][slots]`, as far as they were set.
    layers: Vec<Vec<Vec<LowRankPart>>>,
}

impl Adapters {
    /// Adds a linear layer, and returns its number.
    pub(super) fn add_layer(&mut self) -> usize {
        self.layers.push(Vec::new());
        self.layers.len() - 1
    }

    pub(super) fn set(&mut self, layer: usize, slot: u32, parts: Vec<LowRankPart>) {
        let (slots, slot) = (&mut self.layers[layer], slot as usize);
        if slots.len() <= slot {
            slots.resize_with(slot + 1, Vec::new);
        }
        slots[slot] = parts;
    }

    /// Whether a row of the step has a product in this layer.
    pub(super) fn change(&self, weight: &CpuWeight, inputs: &StepInputs) -> bool {
        inputs.adapters.iter().any(|&slot| !self.parts(weight, slot).is_empty())
    }

    fn parts(&self, weight: &CpuWeight, slot: u32) -> &[LowRankPart] {
        let slots = &self.layers[weight.adapters()];
        let set = (slot != NO_ADAPTER).then(|| slots.get(slot as usize)).flatten();
        set.map_or(&[], Vec::as_slice)
    }

    /// Adds the products of each row's adapter to `out [T, N]`, where `x [T, K]` is the input of the layer.
    pub(super) fn add_products(
        &self,
        pool: &mut Pool,
        inputs: &StepInputs,
        out: &mut [f32],
        x: &[f32],
        weight: &CpuWeight,
    ) {
        let num_tokens = inputs.num_tokens();
        if num_tokens == 0 || !self.change(weight, inputs) {
            return;
        }
        let (rows, cols) = (out.len() / num_tokens, x.len() / num_tokens);
        let mut jobs = Vec::new();
        let mut tokens = out.chunks_exact_mut(rows).zip(x.chunks_exact(cols));
        for (starts, &slot) in inputs.row_starts.windows(2).zip(&inputs.adapters) {
            let parts = self.parts(weight, slot);
            let own = tokens.by_ref().take((starts[1] - starts[0]) as usize);
            jobs.extend(own.filter(|_| !parts.is_empty()).map(|(out, x)| Mutex::new((out, x, parts))));
        }
        pool.each(jobs.len(), 1, |range| {
            for job in &jobs[range] {
                let (out, x, parts) = &mut *ipc::lock(job);
                parts.iter().for_each(|part| add_product(part, out, x));
            }
        });
    }
}

/// `out += scale * B (A x)`.
fn add_product(part: &LowRankPart, out: &mut [f32], x: &[f32]) {
    let inner: Vec<f32> = part.a.chunks_exact(x.len()).map(|a| dot(a, x)).collect();
    for (out, b) in out[part.first_row..].iter_mut().zip(part.b.chunks_exact(part.rank)) {
        *out += part.scale * dot(b, &inner);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
