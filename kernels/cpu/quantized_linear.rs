//! quantized_linear: out[t, n] = sum over groups g of sx[t, g] * sw[n, g] * (sum over k in g of qx[t, k] * qw[n, k]) + bias[n]
//!
//! x, w    `QuantInput` and `QuantMatrix`: 8-bit steps by 8- or 4-bit steps, groups of 64 along `K`
//! maths   sums of a group exact in i32, groups added in f32 in order
//! threads divide the pairs of panels of 16 columns; each is read once for all rows, from memory or the L2 cache
//! bound   memory for few rows, then byte dot products
//! test    tests/cpu_quantized.rs against the stored steps in f64

use std::ops::Range;

use crate::cpu::group_dot::{Group, GroupDot};
use crate::cpu::quantized::{GROUP_K, PAIR, PANEL, QUAD, QUAD_BYTES, SCALE_BYTES};
use crate::cpu::shared::SharedOut;
#[cfg(target_arch = "x86_64")]
use crate::cpu::x86_quantized as x86;
use crate::cpu::{Isa, Pool, QuantInput, QuantMatrix, QuantType};

/// Number of rows whose sums fit into registers beside two panels.
const TILE_ROWS: usize = 6;
/// Bytes of weights that a thread takes at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// `out [rows, N]` = the quantized inputs times the matrix, plus bias.
///
/// # Panics
/// Panics if the inputs were packed for another `K`, or if `out` is too short.
pub fn quantized_linear(pool: &mut Pool, isa: Isa, out: &mut [f32], x: &QuantInput, matrix: &QuantMatrix) {
    assert_eq!(x.cols, matrix.cols, "inputs have K columns");
    assert!(out.len() >= x.rows * matrix.rows, "outputs are [rows, N]");
    let job = Job { out: SharedOut::new(out), x, matrix };
    let run = kernel(isa, matrix.quant_type);
    let pairs = matrix.rows.div_ceil(PAIR * PANEL);
    // Long enough for sequential reads, short enough that threads finish at about the same time.
    let chunk = (CHUNK_BYTES / (matrix.groups() * matrix.quant_type.pair_bytes()).max(1)).clamp(1, 16);
    pool.each(pairs, chunk, |range| {
        // SAFETY: `kernel` selected code for this processor, and chunks of panels are disjoint columns.
        unsafe { run(&job, range) }
    });
}

struct Job<'a> {
    out: SharedOut<f32>,
    x: &'a QuantInput,
    matrix: &'a QuantMatrix,
}

type Kernel = unsafe fn(&Job<'_>, Range<usize>);

fn kernel(isa: Isa, quant_type: QuantType) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    {
        let vnni = isa >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni");
        match (vnni, isa >= Isa::Avx2, quant_type) {
            (true, _, QuantType::Int8) => return int8_vnni,
            (true, _, QuantType::Int4) => return int4_vnni,
            (_, true, QuantType::Int8) => return int8_avx2,
            (_, true, QuantType::Int4) => return int4_avx2,
            _ => {}
        }
    }
    match quant_type {
        QuantType::Int8 => panels::<Portable<8>>,
        QuantType::Int4 => panels::<Portable<4>>,
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! kernels {
    ($($name:ident: $dot:ty, $features:literal;)*) => {
        $(
            #[target_feature(enable = $features)]
            unsafe fn $name(job: &Job<'_>, range: Range<usize>) {
                // SAFETY: passed on.
                unsafe { panels::<$dot>(job, range) }
            }
        )*
    };
}

#[cfg(target_arch = "x86_64")]
kernels! {
    int8_vnni: x86::Vnni<8>, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni";
    int4_vnni: x86::Vnni<4>, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni";
    int8_avx2: x86::Avx2<8>, "avx2,fma,f16c";
    int4_avx2: x86::Avx2<4>, "avx2,fma,f16c";
}

/// Computes all rows of the columns of some pairs of panels.
///
/// # Safety
/// The processor must have `D`'s instructions, and no other thread may compute these columns.
#[inline(always)]
unsafe fn panels<D: GroupDot>(job: &Job<'_>, range: Range<usize>) {
    // Tiles are as even as possible, because one with only a row or two leaves execution units idle.
    let (rows, tiles) = (job.x.rows, job.x.rows.div_ceil(TILE_ROWS));
    for pair in range {
        for tile in 0..tiles {
            let rows = tile * rows / tiles..(tile + 1) * rows / tiles;
            // SAFETY: passed on.
            unsafe {
                match rows.len() {
                    1 => tile_rows::<D, 1>(job, pair, rows.start),
                    2 => tile_rows::<D, 2>(job, pair, rows.start),
                    3 => tile_rows::<D, 3>(job, pair, rows.start),
                    4 => tile_rows::<D, 4>(job, pair, rows.start),
                    5 => tile_rows::<D, 5>(job, pair, rows.start),
                    _ => tile_rows::<D, TILE_ROWS>(job, pair, rows.start),
                }
            }
        }
    }
}

/// `R` rows of a pair of panels.
///
/// # Safety
/// The same as for [`panels`]; there must be `R` rows starting at `row`.
#[inline(always)]
unsafe fn tile_rows<D: GroupDot, const R: usize>(job: &Job<'_>, pair: usize, row: usize) {
    let (groups, quant_type) = (job.matrix.groups(), job.matrix.quant_type);
    let (block, pair_bytes) = (quant_type.block_bytes(), quant_type.pair_bytes());
    // SAFETY: the buffers contain all groups of these rows and panels; the rest is passed on.
    unsafe {
        let mut sums = [[D::zero(); PAIR]; R];
        let weights = job.matrix.data.as_ptr().add(pair * groups * pair_bytes);
        let x = job.x.steps.as_ptr().add(row * groups * GROUP_K);
        let (x_scales, offsets) = (job.x.scales.as_ptr().add(row * groups), job.x.offsets.as_ptr().add(row * groups));
        for group in 0..groups {
            let weights = weights.add(group * pair_bytes);
            let scales = weights.add(PAIR * block);
            let at = Group {
                weights: [weights, weights.add(PANEL * QUAD)],
                weight_scales: [scales.cast(), scales.add(SCALE_BYTES).cast()],
                x: x.add(group * GROUP_K),
                x_stride: groups * GROUP_K,
                x_scales: x_scales.add(group),
                offsets: offsets.add(group),
                scale_stride: groups,
            };
            D::add(&mut sums, at);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (p, sums) in sums.iter().enumerate() {
                put(job, row + r, (pair * PAIR + p) * PANEL, D::get(*sums));
            }
        }
    }
}

/// Writes the outputs of one row starting at column `col`, with their bias.
///
/// # Safety
/// No other thread may write these outputs.
#[inline(always)]
unsafe fn put(job: &Job<'_>, row: usize, col: usize, sums: [f32; PANEL]) {
    let valid = job.matrix.rows.saturating_sub(col).min(PANEL);
    if valid == 0 {
        return; // A padding panel of the last pair.
    }
    // SAFETY: passed on.
    let out = unsafe { job.out.slice(row * job.matrix.rows + col, valid) };
    out.copy_from_slice(&sums[..valid]);
    if let Some(bias) = &job.matrix.bias {
        for (out, bias) in out.iter_mut().zip(&bias[col..]) {
            *out += bias;
        }
    }
}

/// Plain Rust, for processors without a faster implementation.
struct Portable<const BITS: usize>;

impl<const BITS: usize> GroupDot for Portable<BITS> {
    type Sums = [f32; PANEL];

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [0.0; PANEL]
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const P: usize>(sums: &mut [[Self::Sums; P]; R], at: Group<P>) {
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller guarantees a group of each row and panel, here and below.
            let x = unsafe { std::slice::from_raw_parts(at.x.add(r * at.x_stride), GROUP_K) };
            // SAFETY: as above.
            let (scale, offset) =
                unsafe { (*at.x_scales.add(r * at.scale_stride), *at.offsets.add(r * at.scale_stride)) };
            for (p, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as above.
                let (weights, scales) = unsafe {
                    let weights = std::slice::from_raw_parts(
                        at.weights[p],
                        GROUP_K * BITS / 8 / QUAD * QUAD_BYTES - PANEL * QUAD,
                    );
                    (weights, std::slice::from_raw_parts(at.weight_scales[p], PANEL))
                };
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let total = offset + dot::<BITS>(weights, x, lane);
                    *sum += total as f32 * (half::f16::from_bits(scales[lane]).to_f32() * scale);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn get(sums: Self::Sums) -> [f32; PANEL] {
        sums
    }
}

/// The products of one output's group; the weights are unsigned, as stored.
fn dot<const BITS: usize>(weights: &[u8], x: &[i8], lane: usize) -> i32 {
    let stored = GROUP_K * BITS / 8;
    let mut sum = 0;
    for k in 0..stored {
        let byte = weights[k / QUAD * QUAD_BYTES + lane * QUAD + k % QUAD];
        match BITS {
            8 => sum += i32::from(byte) * i32::from(x[k]),
            _ => sum += i32::from(byte & 15) * i32::from(x[k]) + i32::from(byte >> 4) * i32::from(x[k + stored]),
        }
    }
    sum
}
