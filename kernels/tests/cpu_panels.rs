//! Compares products of bf16 panels with the reference, like `cpu_linear.rs` does for rows.
#![cfg(target_arch = "x86_64")]

mod cpu;

use cpu::random;
use kernels::cpu::{
    Gate, Isa, Matrix, PanelInput, PanelMatrix, Pool, WeightType, gate, panel_gated_linear, panel_linear,
};
use kernels::reference;

/// Two parts at an odd address with a stride, NaN around them, and a bias.
fn matrix(weights: &[f32], bias: &[f32], (n, k): (usize, usize)) -> Matrix {
    let row_bytes = (k + 3) * 2;
    let mut data = vec![0xff; 1 + n * row_bytes];
    for (row, weights) in weights.chunks_exact(k).enumerate() {
        let bytes: Vec<u8> = weights.iter().flat_map(|w| half::bf16::from_f32(*w).to_le_bytes()).collect();
        data[1 + row * row_bytes..][..k * 2].copy_from_slice(&bytes);
    }
    let data: &'static [u8] = Box::leak(data.into_boxed_slice());
    let mut matrix = Matrix::new(WeightType::Bf16, k);
    let first = n / 3;
    matrix.stack(&data[1..], first, row_bytes);
    matrix.stack(&data[1 + first * row_bytes..], n - first, row_bytes);
    matrix.set_bias(bias.to_vec());
    matrix
}

fn run(threads: usize, x: &[f32], rows: usize, matrix: &PanelMatrix) -> Vec<f32> {
    let mut pool = Pool::new(threads);
    let mut packed = PanelInput::new(rows, matrix.cols());
    let mut out = vec![f32::NAN; rows * matrix.rows()];
    packed.pack(&mut pool, x, rows, matrix.cols());
    panel_linear(&mut pool, &mut out, &packed, matrix);
    out
}

const SHAPES: [(usize, usize); 8] = [(1, 1), (3, 31), (16, 33), (33, 64), (70, 100), (31, 512), (90, 1026), (5, 4500)];

fn is_supported() -> bool {
    let supported = PanelMatrix::is_supported(Isa::detect());
    if !supported {
        println!("skipped: no AVX-512 BF16");
    }
    supported
}

#[test]
fn panels_agree_with_the_reference_over_odd_shapes() {
    if !is_supported() {
        return;
    }
    for (n, k) in SHAPES {
        let (weights, bias) = (random(1, n * k), random(2, n));
        let panels = PanelMatrix::new(&mut Pool::new(2), &matrix(&weights, &bias, (n, k)));
        for rows in [1, 2, 3, 4, 7, 11, 12, 13, 25, 200] {
            let x = random(3, rows * k);
            let expected = reference::linear(&x, &weights, Some(&bias), k);
            let allowed = (k as f32 + 1.0) * 2f32.powi(-24) * 4.0;
            for (found, expected) in run(2, &x, rows, &panels).iter().zip(&expected) {
                assert!((found - expected).abs() <= allowed, "{rows}x{n}x{k}: {found} not {expected}");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads() {
    if !is_supported() {
        return;
    }
    for (n, k) in SHAPES {
        let (weights, bias) = (random(4, n * k), random(5, n));
        // Not exact in bf16, and of different magnitudes, so that any other order of additions would give other bits.
        let x: Vec<f32> = random(6, 200 * k).iter().enumerate().map(|(i, x)| x * 1.37f32.powi(i as i32 % 23)).collect();
        let panels = PanelMatrix::new(&mut Pool::new(3), &matrix(&weights, &bias, (n, k)));
        let all = run(3, &x, 200, &panels);
        for rows in [1, 2, 5, 12, 13, 31] {
            assert!(run(1, &x, rows, &panels) == all[..rows * n], "{rows}x{n}x{k}");
        }
    }
}

#[test]
fn a_gated_product_has_the_bits_of_a_product_and_a_gate() {
    if !is_supported() {
        return;
    }
    for (n, k) in [(64, 33), (192, 100)] {
        let panels = PanelMatrix::new(&mut Pool::new(2), &matrix(&random(7, n * k), &random(8, n), (n, k)));
        for (rows, kind) in [(1, Gate::Silu), (13, Gate::GeluTanh), (40, Gate::Silu)] {
            let x = random(9, rows * k);
            let (mut pool, mut packed) = (Pool::new(2), PanelInput::new(rows, k));
            let (mut expected, mut found) = (vec![f32::NAN; rows * n / 2], vec![f32::NAN; rows * n / 2]);
            gate(&mut pool, &mut expected, &run(2, &x, rows, &panels), n / 2, kind);
            packed.pack(&mut pool, &x, rows, k);
            panel_gated_linear(&mut pool, &mut found, &packed, &panels, kind);
            assert!(found == expected, "{rows}x{n}x{k}");
        }
    }
}
