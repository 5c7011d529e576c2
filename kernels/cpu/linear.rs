//! linear: out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n]
//!
//! x       [T, K] f32, packed once for all outputs: rounded to bf16 for bf16 weights, else f32
//! w       [N, K] rows of a checkpoint, not copied, with any alignment and row stride; parts stacked along `N`
//! maths   f32 sums in lanes over blocks of 2048 of `K`, lanes are added at the end of each block, blocks in order
//! threads divide the columns; each column's weights are read once for all rows
//! bound   memory for few rows, then multiply-add
//! test    tests/cpu_linear.rs against reference::linear

use std::ops::Range;

use crate::cpu::dot::{Bf16, Dot, F16, F32, Portable, STEP};
use crate::cpu::matrix::{GROUP, Part};
use crate::cpu::packed::{BLOCK_K, TILE_ROWS, tile_at};
use crate::cpu::shared::SharedOut;
#[cfg(target_arch = "x86_64")]
use crate::cpu::x86;
use crate::cpu::{Isa, Matrix, PackedInput, Pool, WeightType};

/// Maximum number of rows for which columns are read one after the other.
const STREAM_ROWS: usize = 4;
/// Number of rows whose packed block of inputs fits into the L2 cache.
const BLOCK_ROWS: usize = 32 * TILE_ROWS;

/// `out [rows, N]` = the packed inputs times the matrix, plus bias.
///
/// # Panics
/// Panics if the inputs were packed for another `K`, or if `out` is too short.
pub fn linear(pool: &mut Pool, isa: Isa, out: &mut [f32], x: &PackedInput, matrix: &Matrix) {
    assert_eq!(x.cols, matrix.cols, "inputs have K columns");
    assert!(out.len() >= x.rows * matrix.rows, "outputs are [rows, N]");
    let job = Job { out: SharedOut::new(out), x, matrix };
    let run = kernel(isa, matrix.weight_type);
    let groups = matrix.num_groups();
    // Enough chunks to distribute evenly, each long enough for sequential reads.
    let chunk = (groups / (8 * pool.threads())).clamp(4, 64);
    pool.each(groups, chunk, |range| {
        // SAFETY: `kernel` selected code for this processor, and chunks of groups are disjoint columns.
        unsafe { run(&job, range) }
    });
}

struct Job<'a> {
    out: SharedOut<f32>,
    x: &'a PackedInput,
    matrix: &'a Matrix,
}

impl Job<'_> {
    /// Writes the sums of one row over the block of `K` at `k`. The first block initializes an output, later ones are
    /// added to it, and the bias is added after the last.
    ///
    /// # Safety
    /// No other thread may write these outputs.
    #[inline(always)]
    unsafe fn put(&self, row: usize, col: usize, k: usize, sums: &[f32]) {
        // SAFETY: passed on.
        let out = unsafe { self.out.slice(row * self.matrix.rows + col, sums.len()) };
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = if k == 0 { *sum } else { *out + sum };
        }
        if k + BLOCK_K >= self.matrix.cols
            && let Some(bias) = &self.matrix.bias
        {
            for (out, bias) in out.iter_mut().zip(&bias[col..]) {
                *out += bias;
            }
        }
    }
}

type Kernel = unsafe fn(&Job<'_>, Range<usize>);

/// The code for weights of a type on a processor with `isa`.
fn kernel(isa: Isa, weight_type: WeightType) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    match (isa, weight_type) {
        (Isa::Avx512Bf16, WeightType::Bf16) => return bf16_avx512_bf16,
        (Isa::Avx512, WeightType::Bf16) => return bf16_avx512,
        (Isa::Avx512Bf16 | Isa::Avx512, WeightType::F16) => return f16_avx512,
        (Isa::Avx512Bf16 | Isa::Avx512, WeightType::F32) => return f32_avx512,
        (Isa::Avx2, WeightType::Bf16) => return bf16_avx2,
        (Isa::Avx2, WeightType::F16) => return f16_avx2,
        (Isa::Avx2, WeightType::F32) => return f32_avx2,
        (Isa::Portable, _) => {}
    }
    match weight_type {
        WeightType::Bf16 => bf16_portable,
        WeightType::F16 => f16_portable,
        WeightType::F32 => f32_portable,
    }
}

/// Compiles the loop for one kind of dot product.
macro_rules! kernels {
    ($($(#[$attribute:meta])* $name:ident: $dot:ty, $inputs:ident;)*) => {
        $(
            $(#[$attribute])*
            unsafe fn $name(job: &Job<'_>, groups: Range<usize>) {
                // SAFETY: passed on.
                unsafe { columns::<$dot>(job, &job.x.$inputs, groups) }
            }
        )*
    };
}

kernels! {
    bf16_portable: Portable<Bf16>, bf16;
    f16_portable: Portable<F16>, f32;
    f32_portable: Portable<F32>, f32;
}

#[cfg(target_arch = "x86_64")]
kernels! {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    bf16_avx512_bf16: x86::Avx512Bf16, bf16;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    bf16_avx512: x86::Avx512<Bf16>, bf16;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    f16_avx512: x86::Avx512<F16>, f32;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    f32_avx512: x86::Avx512<F32>, f32;
    #[target_feature(enable = "avx2,fma,f16c")]
    bf16_avx2: x86::Avx2<Bf16>, bf16;
    #[target_feature(enable = "avx2,fma,f16c")]
    f16_avx2: x86::Avx2<F16>, f32;
    #[target_feature(enable = "avx2,fma,f16c")]
    f32_avx2: x86::Avx2<F32>, f32;
}

/// Computes all rows of the columns in `groups`.
///
/// # Safety
/// The processor must have `D`'s instructions, and no other thread may compute these columns.
#[inline(always)]
unsafe fn columns<D: Dot>(job: &Job<'_>, x: &[D::X], groups: Range<usize>) {
    let (rows, cols) = (job.x.rows, job.matrix.cols);
    // If a column's inputs fit into the L1 cache.
    if rows <= 2 || rows <= STREAM_ROWS && cols <= BLOCK_K {
        // SAFETY: passed on.
        return unsafe { stream_columns::<D>(job, x, groups) };
    }
    for k in (0..cols).step_by(BLOCK_K) {
        for first_row in (0..rows).step_by(BLOCK_ROWS) {
            let rows = first_row..rows.min(first_row + BLOCK_ROWS);
            for part in &job.matrix.parts {
                for group in part.groups_in(&groups) {
                    let weights = GroupWeights::<D>::new(part, group * GROUP, k, cols);
                    // SAFETY: passed on.
                    unsafe { tiles(job, x, &weights, rows.clone(), part.first_row + group * GROUP, k) }
                }
            }
        }
    }
}

/// Like [`columns`], for few rows: reads one column after the other over the whole of `K`, so that memory is read
/// sequentially.
///
/// # Safety
/// The same as for [`columns`].
#[inline(always)]
unsafe fn stream_columns<D: Dot>(job: &Job<'_>, x: &[D::X], groups: Range<usize>) {
    for part in &job.matrix.parts {
        let groups = part.groups_in(&groups);
        for row in groups.start * GROUP..(groups.end * GROUP).min(part.rows) {
            let col = part.first_row + row;
            let weights = &part.data[row * part.row_bytes..][..job.matrix.cols * D::WEIGHT_BYTES];
            // SAFETY: passed on; the inputs are one tile with this number of rows.
            unsafe {
                match job.x.rows {
                    1 => stream::<D, 1>(job, x, weights, col),
                    2 => stream::<D, 2>(job, x, weights, col),
                    3 => stream::<D, 3>(job, x, weights, col),
                    _ => stream::<D, 4>(job, x, weights, col),
                }
            }
        }
    }
}

/// One column for `R` rows of inputs, with the same additions in the same order as [`GroupWeights::tile`].
///
/// # Safety
/// The same as for [`columns`]; the inputs must be one tile of `R` rows, at most four.
#[inline(always)]
unsafe fn stream<D: Dot, const R: usize>(job: &Job<'_>, x: &[D::X], weights: &[u8], col: usize) {
    let cols = job.matrix.cols;
    for k in (0..cols).step_by(BLOCK_K) {
        let len = (cols - k).min(BLOCK_K);
        let x = x[tile_at(R, cols, k, 0).0..].as_ptr();
        let weights = &weights[k * D::WEIGHT_BYTES..][..len * D::WEIGHT_BYTES];
        // SAFETY: `weights` has `len` weights, and the caller guarantees `x`.
        unsafe {
            let mut acc = [D::zero(); R];
            for step in 0..len / STEP {
                let weights = D::load(weights.as_ptr().add(step * STEP * D::WEIGHT_BYTES));
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = D::add(*acc, x.add((step * R + r) * STEP), weights);
                }
            }
            if !len.is_multiple_of(STEP) {
                let padded = pad(&weights[(len - len % STEP) * D::WEIGHT_BYTES..]);
                let weights = D::load(padded.as_ptr());
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = D::add(*acc, x.add((len / STEP * R + r) * STEP), weights);
                }
            }
            let mut lanes = [D::zero(); STREAM_ROWS];
            lanes[..R].copy_from_slice(&acc);
            let sums = D::sum4(lanes);
            for r in 0..R {
                job.put(r, col, k, &sums[r..r + 1]);
            }
        }
    }
}

/// The rest of a row of weights after its last whole step, padded with 0.
fn pad(rest: &[u8]) -> [u8; STEP * 4] {
    let mut padded = [0; STEP * 4];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// The tiles of `rows` by four columns starting at `col`, over one block of `K`.
///
/// # Safety
/// The same as for [`columns`].
#[inline(always)]
unsafe fn tiles<D: Dot>(
    job: &Job<'_>,
    x: &[D::X],
    weights: &GroupWeights<D>,
    rows: Range<usize>,
    col: usize,
    k: usize,
) {
    for tile in rows.step_by(TILE_ROWS) {
        let (start, tile_rows) = tile_at(job.x.rows, job.matrix.cols, k, tile);
        let x = x[start..].as_ptr();
        // SAFETY: passed on; `x` contains a whole tile.
        unsafe {
            match tile_rows {
                1 => weights.tile::<1>(job, x, tile, col, k),
                2 => weights.tile::<2>(job, x, tile, col, k),
                3 => weights.tile::<3>(job, x, tile, col, k),
                4 => weights.tile::<4>(job, x, tile, col, k),
                5 => weights.tile::<5>(job, x, tile, col, k),
                _ => weights.tile::<6>(job, x, tile, col, k),
            }
        }
    }
}

/// Four rows of weights over one block of `K`. The last row is repeated if there are fewer.
struct GroupWeights<D> {
    rows: [*const u8; GROUP],
    valid: usize,
    steps: usize,
    tail: Option<[[u8; STEP * 4]; GROUP]>, // rest of `K`, padded with 0
    dot: std::marker::PhantomData<D>,
}

impl<D: Dot> GroupWeights<D> {
    #[inline(always)]
    fn new(part: &Part, row: usize, k: usize, cols: usize) -> Self {
        let len = (cols - k).min(BLOCK_K);
        let valid = (part.rows - row).min(GROUP);
        let bytes = |c: usize| {
            &part.data[(row + c.min(valid - 1)) * part.row_bytes + k * D::WEIGHT_BYTES..][..len * D::WEIGHT_BYTES]
        };
        let tail = (!len.is_multiple_of(STEP))
            .then(|| std::array::from_fn(|c| pad(&bytes(c)[(len - len % STEP) * D::WEIGHT_BYTES..])));
        let rows: [*const u8; GROUP] = std::array::from_fn(|c| bytes(c).as_ptr());
        Self { rows, valid, steps: len / STEP, tail, dot: std::marker::PhantomData }
    }

    /// `R` rows of inputs by four columns. The sums initialize the output in the first block of `K` and are added to it
    /// in later blocks.
    ///
    /// # Safety
    /// The processor must have `D`'s instructions; `x` must contain a tile of `R` rows; no other thread may write these
    /// outputs.
    #[inline(always)]
    unsafe fn tile<const R: usize>(&self, job: &Job<'_>, x: *const D::X, row: usize, col: usize, k: usize) {
        // Loops instead of closures: a closure would be compiled without this processor's instructions and not be
        // inlined here.
        let mut sums = [[0.0; GROUP]; R];
        // SAFETY: `new` checked that each row has `steps * STEP` weights, and the caller guarantees `x`.
        unsafe {
            let mut acc = [[D::zero(); GROUP]; R];
            let [a, b, c, d] = self.rows;
            for step in 0..self.steps {
                let offset = step * STEP * D::WEIGHT_BYTES;
                let weights =
                    [D::load(a.add(offset)), D::load(b.add(offset)), D::load(c.add(offset)), D::load(d.add(offset))];
                add_step::<D, R>(&mut acc, x.add(step * R * STEP), weights);
            }
            if let Some([a, b, c, d]) = &self.tail {
                let weights = [D::load(a.as_ptr()), D::load(b.as_ptr()), D::load(c.as_ptr()), D::load(d.as_ptr())];
                add_step::<D, R>(&mut acc, x.add(self.steps * R * STEP), weights);
            }
            for r in 0..R {
                sums[r] = D::sum4(acc[r]);
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: only this thread writes these columns.
            unsafe { job.put(row + r, col, k, &sums[..self.valid]) }
        }
    }
}

#[inline(always)]
unsafe fn add_step<D: Dot, const R: usize>(acc: &mut [[D::Acc; GROUP]; R], x: *const D::X, weights: [D::W; GROUP]) {
    for (r, acc) in acc.iter_mut().enumerate() {
        for (acc, weights) in acc.iter_mut().zip(weights) {
            // SAFETY: the caller guarantees `R` rows of 32 inputs.
            *acc = unsafe { D::add(*acc, x.add(r * STEP), weights) };
        }
    }
}
