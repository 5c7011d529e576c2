//! Compares linear layers on the CPU with the reference, for every instruction set of this processor.
//!
//! Inputs and weights are exact in the type that they are rounded to, so only f32 sums differ. The error of `K`
//! additions of terms of size `s` is within `K * s * 2^-24`; sums in lanes have smaller errors.

mod cpu;

use cpu::random;
use kernels::cpu::{Isa, Matrix, PackedInput, Pool, WeightType, linear, read_weights};
use kernels::reference;

fn encode(weights: &[f32], weight_type: WeightType) -> Vec<u8> {
    let bytes = |w: &f32| match weight_type {
        WeightType::Bf16 => half::bf16::from_f32(*w).to_le_bytes().to_vec(),
        WeightType::F16 => half::f16::from_f32(*w).to_le_bytes().to_vec(),
        WeightType::F32 => w.to_le_bytes().to_vec(),
    };
    weights.iter().flat_map(bytes).collect()
}

/// Two parts at an odd address with a stride, NaN around them, and a bias.
fn matrix(weights: &[f32], bias: &[f32], (n, k): (usize, usize), weight_type: WeightType) -> Matrix {
    let (size, row_bytes) = (weight_type.size(), (k + 3) * weight_type.size());
    let mut data = vec![0xff; 1 + n * row_bytes]; // 0xffff is NaN in every type
    for (row, weights) in weights.chunks_exact(k).enumerate() {
        data[1 + row * row_bytes..][..k * size].copy_from_slice(&encode(weights, weight_type));
    }
    let data: &'static [u8] = Box::leak(data.into_boxed_slice());
    let mut matrix = Matrix::new(weight_type, k);
    let first = n / 3;
    matrix.stack(&data[1..], first, row_bytes);
    matrix.stack(&data[1 + first * row_bytes..], n - first, row_bytes);
    matrix.set_bias(bias.to_vec());
    matrix
}

fn run(isa: Isa, threads: usize, x: &[f32], rows: usize, matrix: &Matrix) -> Vec<f32> {
    let mut pool = Pool::new(threads);
    let mut packed = PackedInput::new(rows, matrix.cols());
    let mut out = vec![f32::NAN; rows * matrix.rows()];
    packed.pack(&mut pool, x, rows, matrix.cols(), matrix.weight_type());
    linear(&mut pool, isa, &mut out, &packed, matrix);
    out
}

const SHAPES: [(usize, usize); 8] = [(1, 1), (3, 31), (7, 33), (12, 64), (50, 100), (9, 2048), (6, 2050), (5, 4500)];
const TYPES: [WeightType; 3] = [WeightType::Bf16, WeightType::F16, WeightType::F32];

#[test]
fn every_instruction_set_agrees_with_the_reference_over_odd_shapes() {
    for (n, k) in SHAPES {
        let (weights, bias) = (random(1, n * k), random(2, n));
        for weight_type in TYPES {
            let matrix = matrix(&weights, &bias, (n, k), weight_type);
            for rows in [1, 2, 3, 4, 5, 6, 7, 13, 200] {
                let x = random(3, rows * k);
                let expected = reference::linear(&x, &weights, Some(&bias), k);
                for isa in Isa::available() {
                    let found = run(isa, 2, &x, rows, &matrix);
                    let allowed = (k as f32 + 1.0) * 2f32.powi(-24) * 4.0;
                    for (found, expected) in found.iter().zip(&expected) {
                        let error = (found - expected).abs();
                        assert!(error <= allowed, "{isa:?} {weight_type:?} {rows}x{n}x{k}: {found} not {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads() {
    for (n, k) in SHAPES {
        let (weights, bias) = (random(4, n * k), random(5, n));
        // Not exact in bf16, and of different magnitudes, so that any other order of additions would give other bits.
        let x: Vec<f32> = random(6, 200 * k).iter().enumerate().map(|(i, x)| x * 1.37f32.powi(i as i32 % 23)).collect();
        for weight_type in TYPES {
            let matrix = matrix(&weights, &bias, (n, k), weight_type);
            for isa in Isa::available() {
                let all = run(isa, 3, &x, 200, &matrix);
                for rows in [1, 2, 4, 5, 9, 31] {
                    let some = run(isa, 1, &x, rows, &matrix);
                    assert!(some == all[..rows * n], "{isa:?} {weight_type:?} {rows}x{n}x{k}");
                }
            }
        }
    }
}

#[test]
fn a_row_of_weights_is_read_back_exactly() {
    let weights = random(7, 10 * 33);
    for weight_type in TYPES {
        let matrix = matrix(&weights, &random(8, 10), (10, 33), weight_type);
        let mut row = vec![f32::NAN; 33];
        for (index, expected) in weights.chunks_exact(33).enumerate() {
            matrix.read_row(index, &mut row);
            assert_eq!(row, expected);
        }
        let mut all = vec![f32::NAN; weights.len()];
        read_weights(weight_type, &encode(&weights, weight_type), &mut all);
        assert_eq!(all, weights);
    }
}
