//! Compares linear layers whose weights and inputs are in e4m3 with the plain formula over the values of their codes.

#[path = "gpu/fp8_rows.rs"]
mod fp8_rows;
mod gpu;
#[path = "gpu/quantized.rs"]
mod quantized;
#[path = "gpu/quantized_product.rs"]
mod quantized_product;

use std::sync::Arc;

use fp8_rows::{quantize, quantized_values};
use gpu::{Random, floats, poisoned};
use half::bf16;
use kernels::cuda::fp8_gemm::{Fp8Split, fp8_gemm};
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::quantize_rows::{Fp8Rows, quantize_rows};
use kernels::cuda::quantized_gemm::{PackedFormat, PackedWeight, has_hopper_kernel};
use kernels::cuda::rms_norm::{add_rms_norm, add_rms_norm_fp8};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Span};
use quantized::{FORMATS, QuantizedWeight, e4m3};
use quantized_product::expected;

/// Columns of a slice, which have one scale in a row.
const SLICE: usize = 128;

/// Formats of e4m3.
fn formats() -> impl Iterator<Item = PackedFormat> {
    FORMATS.into_iter().filter(|format| matches!(format, PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks))
}

/// The GPU if it has the kernels.
fn open() -> Option<(Arc<Gpu>, Queue)> {
    let (gpu, queue) = gpu::open()?;
    if !has_hopper_kernel(&gpu) {
        println!("skipped: the kernels need a GPU of compute capability 9");
        return None;
    }
    Some((gpu, queue))
}

#[test]
fn rows_keep_the_nearest_codes_and_the_least_power_of_two() {
    let Some((gpu, queue)) = open() else { return };
    let mut random = Random::new(21);
    for (rows, k) in [(1, 8), (3, 128), (9, 136), (130, 520), (5, 4096)] {
        let mut x = random.bf16s(rows * k, 1.0);
        for (i, value) in x.iter_mut().enumerate() {
            // Slices of very different sizes, one of zeros, and one below the normal numbers.
            let factor = [1.0, 1e-3, 3e4, 0.0, 1e-39, 448.0][i / SLICE % 6];
            *value = bf16::from_f32(value.to_f32() * factor);
        }
        let (_buffer, found) = quantize((&gpu, &queue), &x, k);
        let slices = k.div_ceil(SLICE);
        let codes = found.codes.read::<u8>(rows * slices * SLICE).expect("a copy");
        let scales = found.scales.read::<f32>(slices * rows.next_multiple_of(128)).expect("a copy");
        let values = quantized_values(&floats(&x), k);
        // The order of a slice, from the numbers of its columns.
        let numbers: Vec<u8> = (0..SLICE as u8).collect();
        let mut order = vec![0; SLICE];
        PackedFormat::Fp8Rows.pack_row(&numbers, &mut order);
        for (row, slice, place) in
            (0..rows * slices * SLICE).map(|i| (i / slices / SLICE, i / SLICE % slices, i % SLICE))
        {
            let column = slice * SLICE + usize::from(order[place]);
            let expected = if column < k { values[row * k + column] } else { 0.0 };
            let scale = scales[slice * rows.next_multiple_of(128) + row];
            let value = e4m3(codes[(row * slices + slice) * SLICE + place]) * scale;
            assert_eq!(value, expected, "{rows} x {k}, row {row}, column {column}, scale {scale}");
        }
    }
}

#[test]
fn a_norm_rounds_its_rows_to_the_bits_of_the_kernel_for_it() {
    let Some((gpu, queue)) = open() else { return };
    let mut random = Random::new(24);
    for (rows, k) in [(1, 128), (130, 384), (65, 4096), (3, 14336)] {
        let mut x = random.bf16s(rows * k, 1.0);
        for (i, value) in x.iter_mut().enumerate() {
            *value = bf16::from_f32(value.to_f32() * [1.0, 1e-3, 3e4, 0.0][i / SLICE % 4]);
        }
        let buffer = |values: &[bf16]| DeviceBuffer::from_slice(&gpu, values).expect("memory");
        let (weight, partial) = (buffer(&random.bf16s(k, 1.0)), buffer(&vec![bf16::ZERO; rows * k]));
        let [plain, fused] = [false, true].map(|is_fused| {
            let (residual, y) = (buffer(&x), poisoned::<bf16>(&gpu, &queue, rows * k));
            let codes = poisoned::<u8>(&gpu, &queue, Fp8Rows::bytes(rows, k));
            let (y, residual, partial, weight) = (y.span(), residual.span(), partial.span(), weight.span());
            let to = Fp8Rows::in_buffer(codes.span(), rows, k);
            match is_fused {
                true => add_rms_norm_fp8(&queue, y, residual, partial, weight, to, rows, k, 1e-5),
                false => add_rms_norm(&queue, y, residual, partial, weight, rows, k, 1e-5)
                    .and_then(|()| quantize_rows(&queue, to, y, rows, k)),
            }
            .expect("launches");
            queue.wait().expect("the kernels run");
            [y, residual, codes.span()].map(|span| span.read::<u8>(span.bytes()).expect("a copy"))
        });
        assert_eq!(plain, fused, "{rows} x {k}");
    }
}

/// Error of a product relative to its size: the tensor cores cut the terms of a slice at 2^-13 of the largest.
const TERM_ERROR: f32 = 1.0 / 1024.0;

/// Runs `kernel` with an output filled with NaN and returns all of it.
fn run(
    (gpu, queue): (&Arc<Gpu>, &Queue),
    x: &[bf16],
    weight: &QuantizedWeight,
    epilogue: Epilogue,
    kernel: impl Fn(Span, Fp8Rows, &PackedWeight) -> Result<(), CudaError>,
) -> Vec<f32> {
    let rows = x.len() / weight.k;
    let count = rows * if matches!(epilogue, Epilogue::Gated(_)) { weight.n / 2 } else { weight.n };
    let (_buffer, x) = quantize((gpu, queue), x, weight.k);
    let y = poisoned::<f32>(gpu, queue, count);
    kernel(y.span(), x, &weight.packed()).expect("a launch");
    queue.wait().expect("the kernel runs");
    match epilogue {
        Epilogue::StoreF32 => y.span().read::<f32>(count).expect("a copy"),
        _ => floats(&y.span().read::<bf16>(count).expect("a copy")),
    }
}

#[test]
fn layers_in_e4m3_agree_with_the_formula() {
    let Some((gpu, queue)) = open() else { return };
    let epilogues = [Epilogue::Store, Epilogue::StoreF32, Epilogue::Gated(GateActivation::Silu)];
    let mut random = Random::new(22);
    let mut largest = 0f32;
    for format in formats() {
        for [n, k] in [[64, 128], [208, 136], [1008, 520], [96, 2752], [48, 8], [4608, 1032], [272, 4104]] {
            let weight = QuantizedWeight::random(&gpu, &mut random, [n, k], format, n % 32 == 16);
            let counts: &[usize] = if n > 2048 { &[65, 129] } else { &[1, 65, 128, 129, 300, 2200] };
            for &rows in counts.iter().filter(|&&rows| rows < 1000 || n * k < 64 << 10) {
                let x = random.bf16s(rows * k, 1.0);
                let values = quantized_values(&floats(&x), k);
                for epilogue in epilogues {
                    let expected = expected(&values, &weight, epilogue, TERM_ERROR);
                    let mut check =
                        |what: &str, kernel: &dyn Fn(Span, Fp8Rows, &PackedWeight) -> Result<(), CudaError>| {
                            let found = run((&gpu, &queue), &x, &weight, epilogue, kernel);
                            for (i, (&found, &(expected, tolerance))) in found.iter().zip(&expected).enumerate() {
                                let error = (found - expected).abs();
                                assert!(
                                    error <= tolerance,
                                    "{format:?}, {what}, {rows} x {n} x {k}, {epilogue:?}: element {i} is {found}, {expected} was \
                                 expected within {tolerance}",
                                );
                                largest = largest.max(error / tolerance);
                            }
                        };
                    let multiprocessors = gpu.num_multiprocessors() as usize;
                    let chosen = Fp8Split::for_shape(n, k, format, rows, multiprocessors);
                    check("chosen", &|y, x, packed| fp8_gemm(&queue, y, x, packed, rows, epilogue, chosen));
                    for split in Fp8Split::all(format) {
                        check(&format!("{split:?}"), &|y, x, packed| {
                            fp8_gemm(&queue, y, x, packed, rows, epilogue, split)
                        });
                    }
                }
            }
        }
    }
    println!("the largest error is {largest} of its tolerance");
}

#[test]
fn a_row_alone_gets_the_bits_it_gets_among_others() {
    let Some((gpu, queue)) = open() else { return };
    let mut random = Random::new(23);
    for format in formats() {
        let weight = QuantizedWeight::random(&gpu, &mut random, [1024, 2048], format, false);
        let all = random.bf16s(300 * weight.k, 1.0);
        for parts in 1..=3 {
            let product = |x: &[bf16], split: Fp8Split| {
                run((&gpu, &queue), x, &weight, Epilogue::Store, |y, x_rows, packed| {
                    fp8_gemm(&queue, y, x_rows, packed, x.len() / weight.k, Epilogue::Store, split)
                })
            };
            let together = product(&all, Fp8Split { tile: [128, 128], parts, has_clusters: parts > 1 });
            for split in Fp8Split::all(format).filter(|split| split.parts == parts) {
                assert_eq!(product(&all, split), together, "{format:?}, {split:?}");
                for row in [0, 150, 299] {
                    let alone = product(&all[row * weight.k..(row + 1) * weight.k], split);
                    assert_eq!(
                        alone,
                        together[row * weight.n..(row + 1) * weight.n],
                        "{format:?}, {split:?}, row {row}"
                    );
                }
            }
        }
    }
}
