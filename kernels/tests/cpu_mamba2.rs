//! Compares the CPU's Mamba-2 with the reference, and with itself in other chunks.

mod cpu;

use cpu::random;
use kernels::cpu::{Mamba2Weights, Pool, StateRow, StateShape, mamba2};
use kernels::reference;

const EPS: f32 = 1e-5;

/// Output of a sequence of `tokens` in chunks, and of the reference. Without `norm_heads` there is no norm.
fn outputs(sizes: [usize; 5], norm_heads: Option<usize>, chunks: &[usize]) -> [Vec<f32>; 2] {
    let [num_key_heads, num_value_heads, key_dim, value_dim, num_taps] = sizes;
    let shape = StateShape { num_key_heads, num_value_heads, key_dim, value_dim, num_taps };
    let (tokens, width) = (chunks.iter().sum::<usize>(), num_value_heads * value_dim);
    let stored = random(1, shape.channels() * num_taps);
    let conv: Vec<f32> = (0..num_taps).flat_map(|tap| stored.iter().skip(tap).step_by(num_taps)).copied().collect();
    let conv_bias = random(2, shape.channels());
    let [a_log, dt_bias, skip] = [3, 4, 5].map(|seed| random(seed, num_value_heads));
    let decay: Vec<f32> = a_log.iter().map(|x| -x.exp()).collect();
    let (norm, norm_heads) = (random(6, norm_heads.map_or(0, |_| width)), norm_heads.unwrap_or(1));
    let [inputs, dt] = [(7, shape.channels() + width), (8, num_value_heads)].map(|(s, cols)| random(s, tokens * cols));
    let (conv, conv_bias, decay) = (&conv[..], &conv_bias[..], &decay[..]);
    let weights =
        Mamba2Weights { conv, conv_bias, decay, dt_bias: &dt_bias, skip: &skip, norm: &norm, norm_heads, eps: EPS };
    let (mut states, mut out, mut first) = (vec![7.0; 3 * shape.state_len()], Vec::new(), 0);
    for &num_tokens in chunks {
        let row = StateRow { first_token: 0, num_tokens, state: 1, is_first: first == 0, saved: None };
        let part = |values: &[f32]| {
            let cols = values.len() / tokens;
            values[first * cols..(first + num_tokens) * cols].to_vec()
        };
        let [inputs, dt] = [part(&inputs), part(&dt)];
        let mut chunk = vec![f32::NAN; num_tokens * width];
        mamba2(&mut Pool::new(2), &shape, &weights, &[row], [&inputs, &dt], (&mut chunk, &mut states));
        out.extend(chunk);
        first += num_tokens;
    }
    let by = [&stored[..], conv_bias, &a_log, &dt_bias, &skip, &norm];
    [out, reference::mamba2(sizes, by, &inputs, &dt, (norm_heads, EPS))]
}

#[test]
fn a_sequence_agrees_with_the_reference_in_any_chunks() {
    for (sizes, norm_heads) in [
        ([1, 1, 8, 8, 4], 1),
        ([2, 4, 16, 24, 4], 2),
        ([2, 6, 5, 7, 2], 6),
        ([1, 3, 12, 9, 1], 3),
        ([2, 4, 16, 24, 4], 0),
    ] {
        let norm_heads = (norm_heads > 0).then_some(norm_heads);
        let [whole, expected] = outputs(sizes, norm_heads, &[37]);
        // As for Gated DeltaNet: sums over the last tokens and over a head, divided by a root of at least some hundredths.
        let allowed = (40.0 + sizes[2] as f32) * 16.0 * 2f32.powi(-24);
        for (index, (found, expected)) in whole.iter().zip(&expected).enumerate() {
            let error = (found - expected).abs() / expected.abs().max(1.0);
            assert!(error <= allowed, "{sizes:?}, element {index}: {found} not {expected}, allowed {allowed}");
        }
        for chunks in [&[1; 37][..], &[2, 1, 30, 4]] {
            assert!(outputs(sizes, norm_heads, chunks)[0] == whole, "{sizes:?}: chunks of {chunks:?} tokens");
        }
    }
}
