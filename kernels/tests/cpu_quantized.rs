//! Quantized linear layers: compares every instruction set with the stored steps in f64, and the stored steps with the
//! weights.

use kernels::cpu::{Isa, Matrix, Pool, QuantInput, QuantMatrix, QuantType, WeightType, quantized_linear};

fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn matrix(weights: &[f32], bias: &[f32], k: usize) -> Matrix {
    let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    let mut matrix = Matrix::new(WeightType::F32, k);
    matrix.stack(bytes, weights.len() / k, 4 * k);
    matrix.set_bias(bias.to_vec());
    matrix
}

fn run(isa: Isa, threads: usize, x: &[f32], rows: usize, matrix: &QuantMatrix) -> Vec<f32> {
    let mut pool = Pool::new(threads);
    let mut packed = QuantInput::new(rows, matrix.cols());
    packed.pack(&mut pool, x, rows, matrix.cols(), matrix.quant_type());
    let mut out = vec![f32::NAN; rows * matrix.rows()];
    quantized_linear(&mut pool, isa, &mut out, &packed, matrix);
    out
}

const SHAPES: [(usize, usize); 6] = [(1, 1), (17, 63), (33, 64), (50, 200), (16, 2048), (70, 1100)];
const TYPES: [QuantType; 2] = [QuantType::Int8, QuantType::Int4];

/// The quantized values of `x`: each group of 64 is rounded to steps of 1/127 of its largest element.
fn rounded(x: &[f32], k: usize) -> Vec<f64> {
    let group = |x: &[f32]| {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let scale = f64::from(largest / 127.0);
        x.iter().map(|x| f64::from((x * inverse).round_ties_even()) * scale).collect::<Vec<f64>>()
    };
    x.chunks(k).flat_map(|row| row.chunks(64).flat_map(group).collect::<Vec<f64>>()).collect()
}

#[test]
fn every_instruction_set_gives_the_sums_of_the_stored_steps() {
    let mut pool = Pool::new(2);
    for (n, k) in SHAPES {
        let bias = random(2, n);
        let plain = matrix(&random(1, n * k), &bias, k);
        for quant_type in TYPES {
            let matrix = QuantMatrix::new(&mut pool, &plain, quant_type);
            for rows in [1, 2, 5, 6, 7, 20] {
                let x = random(3, rows * k);
                let exact = rounded(&x, k);
                for isa in Isa::available() {
                    let found = run(isa, 2, &x, rows, &matrix);
                    for (index, found) in found.iter().enumerate() {
                        let (row, col) = (index / n, index % n);
                        let terms = (0..k).map(|i| exact[row * k + i] * f64::from(matrix.weight(col, i)));
                        let expected = terms.sum::<f64>() + f64::from(bias[col]);
                        // Two roundings of each group's scale and one of each sum of groups.
                        let allowed = 3.0 * 2f64.powi(-24) * (k as f64 + 2.0);
                        let error = (f64::from(*found) - expected).abs();
                        assert!(error <= allowed, "{isa:?} {quant_type:?} {rows}x{n}x{k}: {found} not {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn stored_weights_are_half_a_step_from_the_checkpoints() {
    let (n, k) = (33, 200);
    let weights = random(5, n * k);
    let plain = matrix(&weights, &vec![0.0; n], k);
    for (quant_type, steps) in [(QuantType::Int8, 127.0), (QuantType::Int4, 8.0)] {
        let matrix = QuantMatrix::new(&mut Pool::new(1), &plain, quant_type);
        for row in 0..n {
            for (group, weights) in weights[row * k..][..k].chunks(64).enumerate() {
                let step = weights.iter().fold(0.0f32, |largest, w| largest.max(w.abs())) / steps;
                for (index, weight) in weights.iter().enumerate() {
                    // The step is rounded to f16; 4 bits have only 7 steps on the side opposite to the largest weight.
                    let error = (matrix.weight(row, group * 64 + index) - weight).abs();
                    let allowed = if quant_type == QuantType::Int4 { 1.01 } else { 0.6 };
                    assert!(error <= allowed * step, "{quant_type:?}: error {error}, step {step}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads() {
    let (n, k, rows) = (70, 1100, 20);
    let plain = matrix(&random(1, n * k), &random(2, n), k);
    let x = random(3, rows * k);
    for quant_type in TYPES {
        let matrix = QuantMatrix::new(&mut Pool::new(2), &plain, quant_type);
        for isa in Isa::available() {
            let together = run(isa, 2, &x, rows, &matrix);
            for row in 0..rows {
                let alone = run(isa, 1, &x[row * k..][..k], 1, &matrix);
                assert_eq!(alone, together[row * n..][..n], "{isa:?} {quant_type:?} row {row}");
            }
        }
    }
}

#[test]
fn zeros_and_extremes_stay_finite() {
    let (n, k) = (16, 128);
    let mut weights = vec![0.0; n * k];
    weights[0] = 1e-30;
    weights[k] = 6e4;
    let matrix = QuantMatrix::new(&mut Pool::new(1), &matrix(&weights, &vec![0.0; n], k), QuantType::Int8);
    let mut x = vec![0.0; k];
    assert_eq!(run(Isa::detect(), 1, &x, 1, &matrix), vec![0.0; n]);
    x[0] = 1e30;
    assert!(run(Isa::detect(), 1, &x, 1, &matrix).iter().all(|out| out.is_finite()));
}
