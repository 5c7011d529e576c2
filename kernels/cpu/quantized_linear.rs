//! quantized_linear: out[t, n] = sum over groups g of sx[t, g] * sw[n, g] * (sum over k in g of qx[t, k] * qw[n, k]) + bias[n]
//!
//! x, w    `QuantInput` and `QuantMatrix`: 8-bit steps by 8- or 4-bit steps, groups of 64 along `K`
//! maths   sums of a group exact in i32, groups added in f32 in order
//! threads share out panels of 16 columns; each is read once for all rows, from memory or the second cache
//! bound   memory for few rows, then byte dot products
//! test    tests/cpu_quantized.rs against the stored steps in f64

use std::ops::Range;

use crate::cpu::quantized::{GROUP_K, PANEL};
use crate::cpu::shared::SharedOut;
#[cfg(target_arch = "x86_64")]
use crate::cpu::x86_quantized as x86;
use crate::cpu::{Isa, Pool, QuantInput, QuantMatrix, QuantType};

/// Rows whose sums stay in registers beside two panels.
const TILE_ROWS: usize = 6;

/// `out [rows, N]` = the quantised inputs times the matrix, plus bias.
///
/// # Panics
/// When the inputs were packed for another `K`, or `out` is too short.
pub fn quantized_linear(pool: &mut Pool, isa: Isa, out: &mut [f32], x: &QuantInput, matrix: &QuantMatrix) {
    assert_eq!(x.cols, matrix.cols, "inputs have K columns");
    assert!(out.len() >= x.rows * matrix.rows, "outputs are [rows, N]");
    let job = Job { out: SharedOut::new(out), x, matrix };
    let run = kernel(isa, matrix.quant_type);
    let panels = matrix.rows.div_ceil(PANEL);
    // An even number of panels, enough chunks to share evenly.
    let chunk = (panels / (8 * pool.threads())).clamp(2, 16) & !1;
    pool.each(panels, chunk, |range| {
        // SAFETY: `kernel` chose code this processor has, and chunks of panels are disjoint columns.
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

/// Products of one group of a panel.
pub(crate) trait GroupDot {
    /// Sums of 16 outputs in f32.
    type Sums: Copy;

    /// Sums of nothing.
    ///
    /// # Safety
    /// The processor has the instructions of this implementation; so for all functions here.
    unsafe fn zero() -> Self::Sums;

    /// Adds the products of one group of `R` rows and `P` panels.
    ///
    /// # Safety
    /// `weights` and `weight_scales` can be read for a group of a panel; `x` for `R` groups `x_stride` bytes apart, and
    /// `x_scales` and `offsets` for `R` numbers `scale_stride` apart.
    unsafe fn add<const R: usize, const P: usize>(sums: &mut [[Self::Sums; P]; R], group: Group<P>);

    /// The 16 sums.
    ///
    /// # Safety
    /// As [`GroupDot::zero`].
    unsafe fn get(sums: Self::Sums) -> [f32; PANEL];
}

/// Where one group of a tile lies.
#[derive(Clone, Copy)]
pub(crate) struct Group<const P: usize> {
    pub(crate) weights: [*const u8; P],
    pub(crate) weight_scales: [*const u16; P],
    pub(crate) x: *const i8,
    pub(crate) x_stride: usize,
    pub(crate) x_scales: *const f32,
    pub(crate) offsets: *const i32,
    pub(crate) scale_stride: usize,
}

/// All rows of the columns of some panels, two panels at a time.
///
/// # Safety
/// The processor has `D`'s instructions, and no other thread computes these columns.
#[inline(always)]
unsafe fn panels<D: GroupDot>(job: &Job<'_>, range: Range<usize>) {
    for panel in range.clone().step_by(2) {
        for row in (0..job.x.rows).step_by(TILE_ROWS) {
            // SAFETY: passed on.
            unsafe {
                match panel + 1 < range.end {
                    true => tile_rows::<D, 2>(job, panel, row),
                    false => tile_rows::<D, 1>(job, panel, row),
                }
            }
        }
    }
}

/// # Safety
/// As [`panels`].
#[inline(always)]
unsafe fn tile_rows<D: GroupDot, const P: usize>(job: &Job<'_>, panel: usize, row: usize) {
    // SAFETY: passed on.
    unsafe {
        match job.x.rows - row {
            1 => tile::<D, 1, P>(job, panel, row),
            2 => tile::<D, 2, P>(job, panel, row),
            3 => tile::<D, 3, P>(job, panel, row),
            4 => tile::<D, 4, P>(job, panel, row),
            5 => tile::<D, 5, P>(job, panel, row),
            _ => tile::<D, TILE_ROWS, P>(job, panel, row),
        }
    }
}

/// # Safety
/// As [`panels`]; there are `R` rows from `row` and `P` panels from `panel`.
#[inline(always)]
unsafe fn tile<D: GroupDot, const R: usize, const P: usize>(job: &Job<'_>, panel: usize, row: usize) {
    let groups = job.matrix.groups();
    let block = job.matrix.quant_type.block_bytes();
    // SAFETY: the buffers hold all groups of these rows and panels; the rest is passed on.
    unsafe {
        let mut sums = [[D::zero(); P]; R];
        let mut weights = [std::ptr::null(); P];
        let mut weight_scales = [std::ptr::null(); P];
        for p in 0..P {
            weights[p] = job.matrix.data.as_ptr().add((panel + p) * groups * block);
            weight_scales[p] = job.matrix.scales.as_ptr().add((panel + p) * groups * PANEL);
        }
        let x = job.x.steps.as_ptr().add(row * groups * GROUP_K);
        let (x_scales, offsets) = (job.x.scales.as_ptr().add(row * groups), job.x.offsets.as_ptr().add(row * groups));
        for group in 0..groups {
            let mut at = Group {
                weights,
                weight_scales,
                x: x.add(group * GROUP_K),
                x_stride: groups * GROUP_K,
                x_scales: x_scales.add(group),
                offsets: offsets.add(group),
                scale_stride: groups,
            };
            for p in 0..P {
                at.weights[p] = weights[p].add(group * block);
                at.weight_scales[p] = weight_scales[p].add(group * PANEL);
            }
            D::add(&mut sums, at);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (p, sums) in sums.iter().enumerate() {
                put(job, row + r, (panel + p) * PANEL, D::get(*sums));
            }
        }
    }
}

/// Writes the outputs of one row from column `col`, with their bias.
///
/// # Safety
/// Nobody else writes these outputs.
#[inline(always)]
unsafe fn put(job: &Job<'_>, row: usize, col: usize, sums: [f32; PANEL]) {
    let valid = (job.matrix.rows - col).min(PANEL);
    // SAFETY: passed on.
    let out = unsafe { job.out.slice(row * job.matrix.rows + col, valid) };
    out.copy_from_slice(&sums[..valid]);
    if let Some(bias) = &job.matrix.bias {
        for (out, bias) in out.iter_mut().zip(&bias[col..]) {
            *out += bias;
        }
    }
}

/// Plain Rust, for processors without a better one.
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
            // SAFETY: the caller vouches for a group of each row and panel, here and below.
            let x = unsafe { std::slice::from_raw_parts(at.x.add(r * at.x_stride), GROUP_K) };
            // SAFETY: as above.
            let (scale, offset) =
                unsafe { (*at.x_scales.add(r * at.scale_stride), *at.offsets.add(r * at.scale_stride)) };
            for (p, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as above.
                let (weights, scales) = unsafe {
                    let weights = std::slice::from_raw_parts(at.weights[p], PANEL * GROUP_K * BITS / 8);
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

/// One output's group, its weights unsigned as they are stored.
fn dot<const BITS: usize>(weights: &[u8], x: &[i8], lane: usize) -> i32 {
    let stored = GROUP_K * BITS / 8;
    let mut sum = 0;
    for k in 0..stored {
        let byte = weights[k / 4 * PANEL * 4 + lane * 4 + k % 4];
        match BITS {
            8 => sum += i32::from(byte) * i32::from(x[k]),
            _ => sum += i32::from(byte & 15) * i32::from(x[k]) + i32::from(byte >> 4) * i32::from(x[k + stored]),
        }
    }
    sum
}
