//! The formula of products with quantized weights.

use kernels::cuda::skinny_gemm::Epilogue;
use kernels::reference;

use crate::gpu::floats;
use crate::quantized::QuantizedWeight;

/// Expected value and tolerance of each element of a product with `x`: the rounding on store and `term_error` of each term
/// relative to its size, through the gate if there is one.
pub fn expected(x: &[f32], weight: &QuantizedWeight, epilogue: Epilogue, term_error: f32) -> Vec<(f32, f32)> {
    let (n, k) = (weight.n, weight.k);
    let magnitudes = |values: &[f32]| values.iter().map(|v| v.abs()).collect::<Vec<f32>>();
    let bias = weight.bias.as_ref().map(|(bias, _)| floats(bias));
    let sums = reference::linear(x, &weight.values, bias.as_deref(), k);
    let sizes = reference::linear(&magnitudes(x), &magnitudes(&weight.values), None, k);
    let slack = |i: usize| sizes[i] * term_error + sums[i].abs() * 2f32.powi(-20);
    if epilogue == Epilogue::StoreF32 {
        return (0..sums.len()).map(|i| (sums[i], slack(i))).collect();
    }
    if epilogue == Epilogue::Store {
        return (0..sums.len()).map(|i| (sums[i], sums[i].abs() * 2f32.powi(-8) + slack(i))).collect();
    }
    let rows = sums.len() / n;
    let pair = |o: usize| {
        let (row, column) = (o / (n / 2), o % (n / 2));
        let gate = row * n + column / 8 * 16 + column % 8;
        let (g, u) = (reference::silu(sums[gate]), sums[gate + 8]);
        let tolerance = (g * u).abs() * 2f32.powi(-8) * 1.05;
        // The activation has a slope below 1.2.
        (g * u, tolerance + 1.2 * slack(gate) * (u.abs() + slack(gate + 8)) + slack(gate + 8) * g.abs() + 1e-6)
    };
    (0..rows * n / 2).map(pair).collect()
}
