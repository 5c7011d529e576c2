//! Linear layers with weights in 8 and 4 bits on the first GPU, compared with the memory bandwidth.
//!
//! `cargo bench -p kernels --bench cuda_quantized_gemm [-- READ_TB_S] [tune] [e4m3]`; the default bandwidth is 4.47 TB/s, an
//! H200's. The shapes are those of Llama 3 with 8 billion parameters. Each layer runs repeatedly with different weights,
//! which together are larger than the L2 cache. With `tune`, every division of the work is measured; with
//! `e4m3`, only products whose inputs are in e4m3, too.

mod gpu;

use gpu::{ROTATED_BYTES, microseconds, random};
use half::bf16;
use kernels::cuda::fp8_gemm::{Fp8Split, fp8_gemm};
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::quantize_rows::{Fp8Rows, quantize_rows};
use kernels::cuda::quantized_gemm::{
    PackedFormat, PackedWeight, QuantizedSplit, dequantize, quantized_gemm, quantized_gemm_in_order,
    quantized_gemm_split, quantized_wide_gemm,
};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{DeviceBuffer, Span};

/// Name, `N`, `K`.
const SHAPES: [(&str, usize, usize); 4] =
    [("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336)];
const ROWS: [usize; 5] = [1, 8, 16, 32, 64];
/// More rows, by the other kernel.
const MANY_ROWS: [usize; 7] = [65, 128, 256, 512, 1024, 2048, 16384];
/// Rows of products whose inputs are in e4m3, too.
const FP8_ROWS: [usize; 13] = [1, 16, 32, 64, 72, 128, 136, 192, 256, 320, 512, 2048, 16384];
const FORMATS: [PackedFormat; 7] = [
    PackedFormat::Fp8Rows,
    PackedFormat::Fp8Blocks,
    PackedFormat::Int4 { group: 128, has_zeros: true, scale_is_f16: true },
    PackedFormat::Mxfp4,
    PackedFormat::Nvfp4,
    PackedFormat::Int8Rows,
    PackedFormat::Int8 { group: 128, has_zeros: true, scale_is_f16: true },
];

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let read = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(4.47);
    let [tunes, only_e4m3] = ["tune", "e4m3"].map(|name| std::env::args().any(|arg| arg == name));
    println!("{:>9} {:>8} {:>4} {:>7} {:>6} {:>6}", "format", "op", "rows", "us", "TB/s", "% read");
    for (format, (name, n, k)) in FORMATS.into_iter().flat_map(|format| SHAPES.map(|shape| (format, shape))) {
        let bytes = format.codes_bytes(n, k) + format.scales_bytes(n, k);
        let copies = (ROTATED_BYTES / bytes).max(2);
        let buffer = |bytes: usize| (0..copies).map(|_| random(&gpu, bytes.div_ceil(2))).collect::<Vec<_>>();
        let (codes, scales) = (buffer(format.codes_bytes(n, k)), buffer(format.scales_bytes(n, k)));
        let weight = |i: usize| {
            let (codes, scales) = (codes[i % copies].span(), scales[i % copies].span());
            PackedWeight { codes, scales, bias: Span::NULL, n, k, format }
        };
        let label = match format {
            PackedFormat::Fp8Rows => "fp8 rows",
            PackedFormat::Fp8Blocks => "fp8 blk",
            PackedFormat::Int4 { .. } => "int4",
            PackedFormat::Mxfp4 => "mxfp4",
            PackedFormat::Nvfp4 => "nvfp4",
            PackedFormat::Int8Rows => "int8 rows",
            PackedFormat::Int8 { .. } => "int8",
        };
        let epilogue = if name == "gate_up" { Epilogue::Gated(GateActivation::Silu) } else { Epilogue::Store };
        for rows in ROWS.into_iter().filter(|_| !only_e4m3) {
            let (x, y) = (random(&gpu, rows * k), DeviceBuffer::with_count::<bf16>(&gpu, rows * n).expect("memory"));
            let print = |us: f64, what: &str| {
                let rate = bytes as f64 / us / 1e6;
                println!("{label:>9} {name:>8} {rows:>4} {us:>7.1} {rate:>6.2} {:>6.0} {what}", 100.0 * rate / read);
            };
            let us = microseconds(&queue, 2 * copies, |i| {
                quantized_gemm(&queue, y.span(), x.span(), &weight(i), rows, epilogue)
            });
            print(us, "");
            let us = microseconds(&queue, 2 * copies, |i| {
                quantized_gemm_in_order(&queue, y.span(), x.span(), &weight(i), rows, epilogue)
            });
            print(us, "in one order");
            if !tunes {
                continue;
            }
            let mut found = Vec::new();
            for parts in [1, 2, 4] {
                for (groups, ring_kib) in [(2, 32), (2, 48), (2, 64), (2, 100), (2, 200), (4, 64), (4, 100), (4, 200)] {
                    if groups == 4 && rows > 32 {
                        continue;
                    }
                    let split = QuantizedSplit { parts, groups, ring_bytes: ring_kib << 10 };
                    let us = microseconds(&queue, 2 * copies, |i| {
                        quantized_gemm_split(&queue, y.span(), x.span(), &weight(i), rows, epilogue, split)
                    });
                    found.push((us, format!("{parts} parts, {groups} groups, {ring_kib} KiB")));
                }
            }
            found.sort_by(|a, b| a.0.total_cmp(&b.0));
            found.iter().take(4).for_each(|(us, what)| print(*us, what));
        }
        for rows in MANY_ROWS.into_iter().filter(|_| !only_e4m3) {
            let (x, y) = (random(&gpu, rows * k), DeviceBuffer::with_count::<bf16>(&gpu, rows * n).expect("memory"));
            let print = |us: f64, what: &str| {
                let (rate, tflops) = (bytes as f64 / us / 1e6, (2 * rows * n * k) as f64 / us / 1e6);
                println!("{label:>9} {name:>8} {rows:>5} {us:>7.1} {rate:>6.2} TB/s, {tflops:.0} TFLOP/s {what}");
            };
            let runs = copies.min(if rows > 2048 { 2 } else { copies });
            let us = microseconds(&queue, runs, |i| {
                quantized_wide_gemm(&queue, y.span(), x.span(), &weight(i), rows, epilogue)
            });
            print(us, "");
            let us = microseconds(&queue, runs, |i| {
                quantized_gemm_in_order(&queue, y.span(), x.span(), &weight(i), rows, epilogue)
            });
            print(us, "in one order");
        }
        for rows in FP8_ROWS.into_iter().filter(|_| matches!(format, PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks)) {
            let (x, y) = (random(&gpu, rows * k), DeviceBuffer::with_count::<bf16>(&gpu, rows * n).expect("memory"));
            let buffer = DeviceBuffer::new(&gpu, Fp8Rows::bytes(rows, k)).expect("memory");
            let codes = Fp8Rows::in_buffer(buffer.span(), rows, k);
            let print = |us: f64, what: &str| {
                let (rate, tflops) = (bytes as f64 / us / 1e6, (2 * rows * n * k) as f64 / us / 1e6);
                println!(
                    "{label:>9} {name:>8} {rows:>5} {us:>7.1} {rate:>6.2} TB/s, {tflops:>5.0} TFLOP/s, x in e4m3 {what}"
                );
            };
            let runs = copies.min(if rows > 2048 { 2 } else { copies });
            let us = microseconds(&queue, runs, |_| quantize_rows(&queue, codes, x.span(), rows, k));
            println!("{label:>9} {name:>8} {rows:>5} {us:>7.1} to e4m3, {:.2} TB/s", (3 * rows * k) as f64 / us / 1e6);
            let multiprocessors = gpu.num_multiprocessors() as usize;
            let [fastest, invariant] =
                [Fp8Split::for_shape, Fp8Split::invariant].map(|choose| choose(n, k, format, rows, multiprocessors));
            let measured = |split| {
                microseconds(&queue, runs, |i| fp8_gemm(&queue, y.span(), codes, &weight(i), rows, epilogue, split))
            };
            print(measured(fastest), "");
            print(measured(invariant), "in one order");
            if !tunes {
                continue;
            }
            let mut found = Vec::new();
            for split in Fp8Split::all(format).filter(|split| rows <= 512 || !split.has_clusters) {
                found.push((measured(split), format!("{split:?}")));
            }
            found.sort_by(|a, b| a.0.total_cmp(&b.0));
            found.iter().take(4).for_each(|(us, what)| print(*us, what));
        }
        let out = DeviceBuffer::with_count::<bf16>(&gpu, n * k).expect("memory");
        let us = microseconds(&queue, 2 * copies, |i| dequantize(&queue, out.span(), &weight(i)));
        println!("{label:>9} {name:>8}  all {us:>7.1} to bf16, {:.2} TB/s", (bytes + 2 * n * k) as f64 / us / 1e6);
    }
}
