//! Linear layers in bf16 whose sums do not depend on the number of rows, on the first GPU, beside the fastest ones.
//!
//! `cargo bench -p kernels --bench cuda_wide_gemm [-- OP...]`; without names, all ops. The shapes are those of Llama 3 with 8 billion parameters. "fixed" is the
//! kernel for few or for many rows in the order of the layer, in the division that is chosen; then each division. "free" is
//! the kernel for few rows in its own division, and from 65 rows on the library, without activation.

mod gpu;

use std::cell::RefCell;
use std::path::PathBuf;

use gpu::{ROTATED_BYTES, microseconds, random};
use half::bf16;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::library_gemm::{FirstUse, GemmBuffers, GemmShape, LibraryGemm};
use kernels::cuda::skinny_gemm::{Epilogue, LinearWeight, MAX_ROWS, Split, skinny_gemm, skinny_gemm_split};
use kernels::cuda::sum_order::SumOrder;
use kernels::cuda::wide_gemm::{WideSplit, wide_gemm, wide_gemm_split};
use kernels::cuda::{DeviceBuffer, Span};

/// Name, `N`, `K`.
const SHAPES: [(&str, usize, usize); 5] =
    [("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336), ("head", 128_256, 4096)];
const ROWS: [usize; 12] = [1, 8, 32, 64, 65, 128, 192, 256, 384, 512, 2048, 16384];

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let folders = std::env::var_os("LIBRARY_DIR").map(PathBuf::from).into_iter().collect::<Vec<_>>();
    let library = LibraryGemm::new(&gpu, &folders, None).ok().map(RefCell::new);
    if let Some(library) = &library {
        library.borrow_mut().set_first_use(FirstUse::Measure);
    }
    println!("{:>8} {:>6} {:>9} {:>9}  divisions", "op", "rows", "fixed us", "free us");
    let chosen: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for (name, n, k) in SHAPES.into_iter().filter(|(name, ..)| chosen.is_empty() || chosen.iter().any(|op| op == name))
    {
        let copies = (ROTATED_BYTES / (n * k * 2)).max(2);
        let weights: Vec<DeviceBuffer> = (0..copies).map(|_| random(&gpu, n * k)).collect();
        let linear = |i: usize| LinearWeight { weight: weights[i % copies].span(), bias: Span::NULL, n, k };
        let epilogue = if name == "gate_up" { Epilogue::Gated(GateActivation::Silu) } else { Epilogue::Store };
        let order = SumOrder::for_shape(n, k);
        for rows in ROWS.into_iter().filter(|&rows| n < 65536 || rows <= 512) {
            let (x, y) = (random(&gpu, rows * k), DeviceBuffer::with_count::<bf16>(&gpu, rows * n).expect("memory"));
            let (x, y) = (x.span(), y.span());
            let time =
                |call: &dyn Fn(usize) -> Result<(), kernels::cuda::CudaError>| microseconds(&queue, 2 * copies, call);
            let mut others = Vec::new();
            let (fixed, free);
            if rows <= MAX_ROWS {
                fixed = time(&|i| skinny_gemm_split(&queue, y, x, &linear(i), rows, epilogue, order.split()));
                free = time(&|i| skinny_gemm(&queue, y, x, &linear(i), rows, epilogue));
                for (groups, ring_kib) in [(1, 48), (1, 64), (1, 100), (2, 48), (2, 64), (2, 104), (2, 200), (4, 200)] {
                    let split = Split { parts: order.parts, groups, ring_bytes: ring_kib << 10 };
                    let us = time(&|i| skinny_gemm_split(&queue, y, x, &linear(i), rows, epilogue, split));
                    others.push(format!("{groups} groups {ring_kib} KiB {us:.1}"));
                }
            } else {
                fixed = time(&|i| wide_gemm(&queue, y, x, &linear(i), rows, epilogue, order));
                free = library.as_ref().map_or(f64::NAN, |library| {
                    let shape = GemmShape { m: rows, n, k, stride: n, to_f32: false };
                    let buffers = |i| GemmBuffers { y, x, w: linear(i).weight, bias: Span::NULL };
                    time(&|i| library.borrow_mut().run(&queue, shape, buffers(i)))
                });
                for (cols, is_split) in [(128, false), (128, true), (224, false), (256, false)] {
                    if (cols != 224 || order.runs() == 1) && (!is_split || order.parts > 1) {
                        let split = WideSplit { cols, is_split };
                        let us = time(&|i| wide_gemm_split(&queue, y, x, &linear(i), rows, epilogue, order, split));
                        others.push(format!("{cols}{} {us:.1}", if is_split { " split" } else { "" }));
                    }
                }
            }
            println!("{name:>8} {rows:>6} {fixed:>9.1} {free:>9.1}  {}", others.join(", "));
        }
    }
}
