//! Linear layers on this CPU, compared with the memory bandwidth: few rows stream the weights, many rows are bound by
//! products.
//!
//! `cargo bench -p kernels --bench cpu_linear [-- THREADS... NAMES...]`; `read` measures the memory bandwidth alone.
//! The shapes are those of a Llama with 1.04 billion parameters: hidden size 2048, 32 heads, 8 KV heads, inner width
//! 8192. The weights are larger than the caches and are read in turn.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kernels::cpu::{
    Buffer, Isa, Matrix, PackedInput, PanelInput, PanelMatrix, Pool, QuantInput, QuantMatrix, QuantType, WeightType,
    linear, quantized_linear,
};

/// `N`, `K`, name.
const SHAPES: [(usize, usize, &str); 4] =
    [(3072, 2048, "qkv"), (2048, 2048, "out"), (16384, 2048, "gate_up"), (2048, 8192, "down")];
/// More than the last-level cache.
const WEIGHT_BYTES: usize = 256 << 20;
const BUDGET: Duration = Duration::from_millis(200);
const ROWS: [usize; 5] = [1, 4, 8, 32, 128];

fn main() {
    let threads: Vec<usize> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let named: Vec<_> = SHAPES.into_iter().filter(|shape| std::env::args().any(|arg| arg == shape.2)).collect();
    let only_read = std::env::args().any(|arg| arg == "read");
    let shapes = if named.is_empty() && !only_read { SHAPES.to_vec() } else { named };
    let threads = if threads.is_empty() { vec![1, 2] } else { threads };
    let data: &'static [u8] = bytemuck::cast_slice(Box::leak(Box::new(random_bf16(WEIGHT_BYTES))));
    println!("{:?}, {} threads seen", Isa::detect(), std::thread::available_parallelism().map_or(0, |n| n.get()));
    for threads in threads {
        let mut pool = Pool::new(threads);
        let bandwidth = read_bandwidth(&mut pool, data);
        println!("threads {threads}: memory read {bandwidth:.1} GB/s");
        println!("{:>8} {:>6} {:>5} {:>9} {:>8} {:>8} {:>9}", "op", "N x K", "", "rows", "us", "GB/s", "% read");
        for &(n, k, name) in &shapes {
            let bandwidth = read_bandwidth(&mut pool, data); // Measured again, because other load on the machine changes it.
            for rows in ROWS {
                measure(&mut pool, data, (n, k, name), rows, bandwidth);
            }
            #[cfg(target_arch = "x86_64")]
            if PanelMatrix::is_supported(Isa::detect()) {
                measure_panels(&mut pool, data, (n, k, name), bandwidth);
            }
            for quant_type in [QuantType::Int8, QuantType::Int4] {
                measure_quantized(&mut pool, data, (n, k, name), bandwidth, quant_type);
            }
        }
    }
}

fn measure(pool: &mut Pool, data: &'static [u8], (n, k, name): (usize, usize, &str), rows: usize, bandwidth: f64) {
    let bytes = n * k * 2;
    let matrices: Vec<Matrix> = data
        .chunks_exact(bytes)
        .map(|data| {
            let mut matrix = Matrix::new(WeightType::Bf16, k);
            matrix.stack(data, n, k * 2);
            matrix
        })
        .collect();
    let x = inputs(rows * k);
    let mut packed = PackedInput::new(rows, k);
    let mut out = Buffer::<f32>::new(rows * n);
    let mut next = 0;
    let seconds = median(pool.threads(), || {
        packed.pack(pool, &x, rows, k, WeightType::Bf16);
        linear(pool, Isa::detect(), &mut out, &packed, &matrices[next % matrices.len()]);
        next += 1;
    });
    black_box(&out);
    print_line((n, k, name), rows, bytes, seconds, bandwidth, "rows");
}

/// Like [`measure`], with weights in panels.
#[cfg(target_arch = "x86_64")]
fn measure_panels(pool: &mut Pool, data: &'static [u8], (n, k, name): (usize, usize, &str), bandwidth: f64) {
    let matrices: Vec<PanelMatrix> = data
        .chunks_exact(n * k * 2)
        .map(|data| {
            let mut matrix = Matrix::new(WeightType::Bf16, k);
            matrix.stack(data, n, k * 2);
            PanelMatrix::new(pool, &matrix)
        })
        .collect();
    for rows in ROWS {
        let x = inputs(rows * k);
        let mut packed = PanelInput::new(rows, k);
        let mut out = Buffer::<f32>::new(rows * n);
        let mut next = 0;
        let seconds = median(pool.threads(), || {
            packed.pack(pool, &x, rows, k);
            kernels::cpu::panel_linear(pool, &mut out, &packed, &matrices[next % matrices.len()]);
            next += 1;
        });
        black_box(&out);
        print_line((n, k, name), rows, matrices[0].bytes(), seconds, bandwidth, "panels");
    }
}

/// Like [`measure`], with quantized weights; it counts the bytes that are read.
fn measure_quantized(
    pool: &mut Pool,
    data: &'static [u8],
    (n, k, name): (usize, usize, &str),
    bandwidth: f64,
    quant_type: QuantType,
) {
    let mut plain = Matrix::new(WeightType::Bf16, k);
    plain.stack(data, n, k * 2);
    // Together larger than the last-level cache.
    let matrices: Vec<QuantMatrix> =
        (0..(128 << 20) / (n * k) + 1).map(|_| QuantMatrix::new(pool, &plain, quant_type)).collect();
    for rows in ROWS {
        let x = inputs(rows * k);
        let mut packed = QuantInput::new(rows, k);
        let mut out = Buffer::<f32>::new(rows * n);
        let mut next = 0;
        let seconds = median(pool.threads(), || {
            packed.pack(pool, &x, rows, k, quant_type);
            quantized_linear(pool, Isa::detect(), &mut out, &packed, &matrices[next % matrices.len()]);
            next += 1;
        });
        black_box(&out);
        print_line((n, k, name), rows, matrices[0].bytes(), seconds, bandwidth, &format!("{quant_type:?}"));
    }
}

fn inputs(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect()
}

fn print_line((n, k, name): (usize, usize, &str), rows: usize, bytes: usize, seconds: f64, bandwidth: f64, how: &str) {
    let (gbs, gops) = (bytes as f64 / seconds / 1e9, 2e-9 * (rows * n * k) as f64 / seconds);
    println!(
        "{name:>8} {n:>6}x{k:<5} {rows:>6} {:>9.0} us {gbs:>7.1} GB/s {:>4.0} % {gops:>8.1} GOP/s {how}",
        seconds * 1e6,
        100.0 * gbs / bandwidth
    );
}

/// Sums all bytes as 64-bit words; each thread has its own range.
fn read_bandwidth(pool: &mut Pool, data: &[u8]) -> f64 {
    let words: &[u64] = bytemuck::cast_slice(data);
    let seconds = median(pool.threads(), || {
        pool.each_contiguous(words.len(), 1 << 15, |range| {
            let mut sums = [0u64; 32];
            for chunk in words[range].chunks_exact(32) {
                for (sum, word) in sums.iter_mut().zip(chunk) {
                    *sum = sum.wrapping_add(*word);
                }
            }
            black_box(sums);
        });
    });
    data.len() as f64 / seconds / 1e9
}

/// Median of the seconds of a job. With one thread, CPU time is measured, so that other load on the machine has less
/// effect.
fn median(threads: usize, mut job: impl FnMut()) -> f64 {
    job();
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || start.elapsed() < BUDGET {
        let (start, cpu_start) = (Instant::now(), cpu_seconds());
        job();
        times.push(if threads == 1 { cpu_seconds() - cpu_start } else { start.elapsed().as_secs_f64() });
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// CPU time of this thread; `/proc` reports it in nanoseconds.
fn cpu_seconds() -> f64 {
    std::thread::yield_now(); // The counter is updated when a thread is scheduled.
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("/proc is mounted");
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("its first field is nanoseconds") * 1e-9
}

/// bf16 numbers of either sign with magnitudes below 0.02.
fn random_bf16(bytes: usize) -> Buffer<u16> {
    let mut state = 1u64;
    let mut words = Buffer::new(bytes / 2);
    for word in words.iter_mut() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *word = 0x3c00 | (state >> 48) as u16 & 0x807f;
    }
    words
}
