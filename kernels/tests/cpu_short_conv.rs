//! Compares the CPU's short convolution with the reference, and with itself in other chunks.

mod cpu;

use cpu::random;
use kernels::cpu::{Pool, StateRow, StateShape, short_conv};
use kernels::reference;

/// Output of a sequence of `tokens` in chunks, and of the reference.
fn outputs([heads, value_dim, num_taps]: [usize; 3], chunks: &[usize]) -> [Vec<f32>; 2] {
    let shape = StateShape { num_key_heads: heads, num_value_heads: heads, key_dim: 0, value_dim, num_taps };
    let (tokens, width) = (chunks.iter().sum::<usize>(), heads * value_dim);
    assert_eq!(shape.state_len(), (num_taps - 1) * width);
    let (stored, conv_bias) = (random(1, width * num_taps), random(2, width));
    let conv: Vec<f32> = (0..num_taps).flat_map(|tap| stored.iter().skip(tap).step_by(num_taps)).copied().collect();
    let (inputs, gates) = (random(3, tokens * 2 * width), random(4, tokens * width));
    let (mut states, mut out, mut first) = (vec![7.0; 3 * shape.state_len()], Vec::new(), 0);
    for &num_tokens in chunks {
        // The last slot, behind which there is nothing.
        let row = StateRow { first_token: 0, num_tokens, state: 2, is_first: first == 0, saved: None };
        let [inputs, gates] =
            [(&inputs, 2 * width), (&gates, width)].map(|(of, cols)| &of[first * cols..(first + num_tokens) * cols]);
        let mut chunk = vec![f32::NAN; num_tokens * width];
        short_conv(&mut Pool::new(2), &shape, [&conv, &conv_bias], &[row], [inputs, gates], (&mut chunk, &mut states));
        out.extend(chunk);
        first += num_tokens;
    }
    [out, reference::short_conv(&stored, &conv_bias, &inputs, &gates)]
}

#[test]
fn a_sequence_agrees_with_the_reference_in_any_chunks() {
    for sizes in [[4, 16, 3], [3, 20, 4], [1, 5, 2]] {
        let [whole, expected] = outputs(sizes, &[37]);
        // A sum of the taps and a bias, and three products.
        let allowed = (sizes[2] + 4) as f32 * 2f32.powi(-23);
        for (index, (found, expected)) in whole.iter().zip(&expected).enumerate() {
            let error = (found - expected).abs();
            assert!(error <= allowed, "{sizes:?}, element {index}: {found} not {expected}, allowed {allowed}");
        }
        for chunks in [&[1; 37][..], &[2, 1, 30, 4]] {
            assert!(outputs(sizes, chunks)[0] == whole, "{sizes:?}: chunks of {chunks:?} tokens");
        }
    }
}
