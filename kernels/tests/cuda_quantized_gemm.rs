//! Compares linear layers with weights in 8 and 4 bits with the plain formula over the values of their codes.

mod gpu;
#[path = "gpu/quantized.rs"]
mod quantized;
#[path = "gpu/quantized_product.rs"]
mod quantized_product;

use std::sync::Arc;

use gpu::{Random, floats, poisoned};
use half::bf16;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::quantized_gemm::{
    PackedFormat, PackedWeight, QuantizedSplit, dequantize, has_hopper_kernel, quantized_gemm, quantized_gemm_in_order,
    quantized_gemm_simple, quantized_gemm_split, quantized_wide_gemm,
};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Span};
use quantized::{FORMATS, QuantizedWeight};
use quantized_product::expected;

/// Runs `kernel` with an output filled with NaN and returns all of it.
fn run(
    (gpu, queue): (&Arc<Gpu>, &Queue),
    x: &[bf16],
    weight: &QuantizedWeight,
    epilogue: Epilogue,
    kernel: impl Fn(Span, Span, &PackedWeight),
) -> Vec<f32> {
    let rows = x.len() / weight.k;
    let count = rows * if matches!(epilogue, Epilogue::Gated(_)) { weight.n / 2 } else { weight.n };
    let buffer = DeviceBuffer::from_slice(gpu, x).expect("memory");
    let y = poisoned::<f32>(gpu, queue, count);
    kernel(y.span(), buffer.span(), &weight.packed());
    queue.wait().expect("the kernel runs");
    match epilogue {
        Epilogue::StoreF32 => y.span().read::<f32>(count).expect("a copy"),
        _ => floats(&y.span().read::<bf16>(count).expect("a copy")),
    }
}

#[test]
fn few_rows_through_a_quantized_layer_agree_with_the_formula() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let epilogues = [Epilogue::Store, Epilogue::StoreF32, Epilogue::Gated(GateActivation::Silu)];
    let mut random = Random::new(11);
    for format in FORMATS {
        for [n, k] in [[64, 128], [208, 136], [1008, 520], [96, 2752], [48, 8], [16, 4096], [272, 1032]] {
            let weight = QuantizedWeight::random(&gpu, &mut random, [n, k], format, n % 32 == 16);
            for rows in [1, 2, 7, 8, 9, 17, 33, 64] {
                let x = random.bf16s(rows * k, 1.0);
                for epilogue in epilogues {
                    let expected = expected(&floats(&x), &weight, epilogue, k as f32 * 2f32.powi(-24));
                    let check = |what: &str, kernel: &dyn Fn(Span, Span, &PackedWeight) -> Result<(), CudaError>| {
                        let found = run((&gpu, &queue), &x, &weight, epilogue, |y, x, packed| {
                            kernel(y, x, packed).expect("a launch");
                        });
                        for (i, (&found, &(expected, tolerance))) in found.iter().zip(&expected).enumerate() {
                            assert!(
                                (found - expected).abs() <= tolerance,
                                "{format:?}, {what}, {rows} x {n} x {k}, {epilogue:?}: element {i} is {found}, {expected} was \
                                 expected within {tolerance}",
                            );
                        }
                    };
                    check("chosen", &|y, x, packed| quantized_gemm(&queue, y, x, packed, rows, epilogue));
                    check("simple", &|y, x, packed| quantized_gemm_simple(&queue, y, x, packed, rows, epilogue));
                    if !has_hopper_kernel(&gpu) {
                        continue;
                    }
                    for (parts, groups) in [(1, 2), (2, 2), (4, 4), (4, 2), (1, 4)] {
                        let groups = if rows > 32 { 2 } else { groups };
                        let split = QuantizedSplit { parts, groups, ring_bytes: 96 << 10 };
                        check(&format!("{split:?}"), &|y, x, packed| {
                            quantized_gemm_split(&queue, y, x, packed, rows, epilogue, split)
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn many_rows_through_a_quantized_layer_agree_with_the_formula() {
    let Some((gpu, queue)) = gpu::open() else { return };
    if !has_hopper_kernel(&gpu) {
        println!("skipped: the kernel needs a GPU of compute capability 9");
        return;
    }
    let epilogues = [Epilogue::Store, Epilogue::StoreF32, Epilogue::Gated(GateActivation::Silu)];
    let mut random = Random::new(14);
    for format in FORMATS {
        for [n, k] in [[64, 128], [208, 136], [1008, 520], [96, 2752], [48, 8], [4608, 1032], [9216, 264]] {
            let weight = QuantizedWeight::random(&gpu, &mut random, [n, k], format, n % 32 == 16);
            // Wide shapes cost the formula seconds.
            let counts: &[usize] = if n > 2048 { &[65, 129] } else { &[1, 65, 128, 129, 300] };
            for &rows in counts {
                let x = random.bf16s(rows * k, 1.0);
                for epilogue in epilogues {
                    let expected = expected(&floats(&x), &weight, epilogue, k as f32 * 2f32.powi(-24));
                    let found = run((&gpu, &queue), &x, &weight, epilogue, |y, x, packed| {
                        quantized_wide_gemm(&queue, y, x, packed, rows, epilogue).expect("a launch");
                    });
                    for (i, (&found, &(expected, tolerance))) in found.iter().zip(&expected).enumerate() {
                        assert!(
                            (found - expected).abs() <= tolerance,
                            "{format:?}, {rows} x {n} x {k}, {epilogue:?}: element {i} is {found}, {expected} was expected \
                             within {tolerance}",
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_alone_gets_the_bits_it_gets_among_others() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(12);
    for format in FORMATS {
        let weight = QuantizedWeight::random(&gpu, &mut random, [1024, 2048], format, false);
        let all = random.bf16s(32 * weight.k, 1.0);
        let product = |x: &[bf16]| {
            run((&gpu, &queue), x, &weight, Epilogue::Store, |y, span, packed| {
                quantized_gemm(&queue, y, span, packed, x.len() / weight.k, Epilogue::Store).expect("a launch");
            })
        };
        let together = product(&all);
        for row in [0, 13, 31] {
            let alone = product(&all[row * weight.k..(row + 1) * weight.k]);
            assert_eq!(alone, together[row * weight.n..(row + 1) * weight.n], "{format:?}, row {row}");
        }
    }
}

#[test]
fn few_and_many_rows_in_one_order_have_the_same_bits() {
    let Some((gpu, queue)) = gpu::open() else { return };
    if !has_hopper_kernel(&gpu) {
        println!("skipped: the kernel needs a GPU of compute capability 9");
        return;
    }
    let mut random = Random::new(15);
    let gated = Epilogue::Gated(GateActivation::Silu);
    for format in FORMATS {
        // Widths whose K has one, two and four parts, slices that are no multiple of the runs, and fewer slices than runs.
        for ([n, k], epilogue) in [
            ([1024, 2048], Epilogue::Store),
            ([1008, 2312], Epilogue::StoreF32),
            ([272, 136], Epilogue::Store),
            ([3072, 1160], Epilogue::Store),
            ([4608, 1032], gated),
        ] {
            let weight = QuantizedWeight::random(&gpu, &mut random, [n, k], format, n % 32 == 16);
            let all = random.bf16s(300 * k, 1.0);
            let product = |x: &[bf16]| {
                let rows = x.len() / k;
                run((&gpu, &queue), x, &weight, epilogue, |y, span, packed| {
                    quantized_gemm_in_order(&queue, y, span, packed, rows, epilogue).expect("a launch");
                })
            };
            let together = product(&all);
            let outputs = together.len() / 300;
            for rows in [0..1, 7..15, 100..133, 236..300, 0..65, 128..257] {
                let apart = product(&all[rows.start * k..rows.end * k]);
                let expected = &together[rows.start * outputs..rows.end * outputs];
                assert!(apart == expected, "{format:?}, {n} x {k}, rows {rows:?}");
            }
        }
    }
}

#[test]
fn expanded_weights_are_their_values_rounded_once() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(13);
    let sizes = [[8, 8], [64, 128], [72, 264], [200, 1032]];
    // All experts of a layer are one weight, with more rows of blocks than a grid has in its second dimension.
    let tall = (PackedFormat::Fp8Blocks, [8 * 65_536 + 8, 8]);
    let all = FORMATS.into_iter().flat_map(|format| sizes.map(|size| (format, size))).chain([tall]);
    for (format, [n, k]) in all {
        let weight = QuantizedWeight::random(&gpu, &mut random, [n, k], format, false);
        let out = poisoned::<bf16>(&gpu, &queue, n * k);
        dequantize(&queue, out.span(), &weight.packed()).expect("a launch");
        queue.wait().expect("the kernel runs");
        let expected: Vec<f32> = weight.values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
        let found = floats(&out.span().read::<bf16>(n * k).expect("a copy"));
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "{format:?}, {n} x {k}");
    }
}
