//! linear: out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n]
//!
//! x       [T, K] f32, packed once for all outputs: rounded to bf16 beside bf16 weights, else f32
//! w       [N, K] rows of a checkpoint as they lie there, at any alignment and row stride; parts stacked along `N`
//! maths   f32 sums in lanes over blocks of 2048 of `K`, lanes added at each block's end, blocks in order
//! threads share out columns; each column's weights are read once for all rows
//! bound   memory for few rows, then multiply-add
//! test    tests/cpu_linear.rs against reference::linear

use std::ops::Range;

use crate::cpu::dot::{Bf16, Dot, F16, F32, Portable, STEP};
use crate::cpu::{Buffer, Isa, Pool};

/// `K` is summed in blocks of so many: a block of few columns and of a tile's rows stays in the first cache.
const BLOCK_K: usize = 2048;
/// Rows that share one reading of the weights from registers.
const TILE_ROWS: usize = 6;
/// Columns computed together.
const GROUP: usize = 4;
/// Rows whose packed block of inputs stays in the second cache.
const BLOCK_ROWS: usize = 32 * TILE_ROWS;

/// Element type of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl WeightType {
    /// Bytes of one weight.
    pub fn size(self) -> usize {
        match self {
            WeightType::Bf16 | WeightType::F16 => 2,
            WeightType::F32 => 4,
        }
    }
}

/// A weight matrix `[N, K]` that lies elsewhere, in parts stacked along `N`.
#[derive(Debug, Clone)]
pub struct Matrix {
    weight_type: WeightType,
    cols: usize,
    rows: usize,
    parts: Vec<Part>,
    bias: Option<Vec<f32>>,
}

#[derive(Debug, Clone)]
struct Part {
    data: &'static [u8], // from the first element taken
    rows: usize,
    row_bytes: usize,   // from one row to the next
    first_row: usize,   // in the matrix
    first_group: usize, // groups of the parts before
}

impl Part {
    fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }
}

impl Matrix {
    /// A matrix without rows, of `cols` = `K`.
    pub fn new(weight_type: WeightType, cols: usize) -> Self {
        Self { weight_type, cols, rows: 0, parts: Vec::new(), bias: None }
    }

    /// Stacks `rows` rows below: row `i` is at `data[i * row_bytes..]`.
    ///
    /// # Panics
    /// When `data` ends before its last row.
    pub fn stack(&mut self, data: &'static [u8], rows: usize, row_bytes: usize) {
        let width = self.cols * self.weight_type.size();
        assert!(rows == 0 || (rows - 1) * row_bytes + width <= data.len(), "weights end before their last row");
        let first_group = self.num_groups();
        self.parts.push(Part { data, rows, row_bytes, first_row: self.rows, first_group });
        self.rows += rows;
    }

    /// Adds `bias [N]` to each output.
    ///
    /// # Panics
    /// When its length is not `N`.
    pub fn set_bias(&mut self, bias: Vec<f32>) {
        assert_eq!(bias.len(), self.rows, "one bias for each output");
        self.bias = Some(bias);
    }

    /// `N`.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `K`.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Bytes that one product reads.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.weight_type.size()
    }

    /// Row `index` as f32, for an embedding.
    ///
    /// # Panics
    /// When there is no such row, or `out` is not `[K]`.
    pub fn read_row(&self, index: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a row has K elements");
        let part = self.parts.iter().find(|part| (part.first_row..part.first_row + part.rows).contains(&index));
        let part = part.expect("the row is in the matrix");
        let size = self.weight_type.size();
        let bytes = &part.data[(index - part.first_row) * part.row_bytes..][..self.cols * size];
        read_weights(self.weight_type, bytes, out);
    }

    fn num_groups(&self) -> usize {
        self.parts.last().map_or(0, |part| part.first_group + part.groups())
    }
}

/// `out[i]` = weight `i` of `bytes`.
///
/// # Panics
/// When their lengths differ.
pub fn read_weights(weight_type: WeightType, bytes: &[u8], out: &mut [f32]) {
    use crate::cpu::dot::Element;
    let size = weight_type.size();
    assert_eq!(bytes.len(), out.len() * size, "one output for each weight");
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(size)) {
        *out = match weight_type {
            WeightType::Bf16 => Bf16::weight(bytes),
            WeightType::F16 => F16::weight(bytes),
            WeightType::F32 => F32::weight(bytes),
        };
    }
}

/// Inputs of a linear layer in the order its inner loop reads them.
///
/// For each block of `K` and tile of rows: steps of 32 elements, each row of the tile in turn, padded with 0.
pub struct PackedInput {
    bf16: Buffer<u16>,
    f32: Buffer<f32>,
    rows: usize,
    cols: usize,
}

impl PackedInput {
    /// Room for `max_rows` rows of `max_cols`.
    pub fn new(max_rows: usize, max_cols: usize) -> Self {
        let len = max_rows * max_cols.next_multiple_of(STEP);
        Self { bf16: Buffer::new(len), f32: Buffer::new(len), rows: 0, cols: 0 }
    }

    /// Packs `x [rows, cols]` for weights of `weight_type`.
    ///
    /// # Panics
    /// When `x` is shorter, or larger than the room.
    pub fn pack(&mut self, pool: &mut Pool, x: &[f32], rows: usize, cols: usize, weight_type: WeightType) {
        assert!(x.len() >= rows * cols, "inputs are [rows, cols]");
        assert!(rows * cols.next_multiple_of(STEP) <= self.f32.len(), "packed inputs fit");
        (self.rows, self.cols) = (rows, cols);
        match weight_type {
            WeightType::Bf16 => pack(pool, x, rows, cols, &mut self.bf16, bf16_bits),
            WeightType::F16 | WeightType::F32 => pack(pool, x, rows, cols, &mut self.f32, |x| x),
        }
    }
}

/// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    if x.is_nan() { ((bits >> 16) | 0x40) as u16 } else { (rounded >> 16) as u16 }
}

/// Where the block of `K` from `k` and the tile from `row` start, and rows of the tile.
#[inline(always)]
fn tile_at(rows: usize, cols: usize, k: usize, row: usize) -> (usize, usize) {
    let block = (cols - k).min(BLOCK_K).next_multiple_of(STEP);
    (rows * k + row * block, (rows - row).min(TILE_ROWS))
}

fn pack<T: bytemuck::Pod + Send + Sync>(
    pool: &mut Pool,
    x: &[f32],
    rows: usize,
    cols: usize,
    out: &mut [T],
    convert: impl Fn(f32) -> T + Sync,
) {
    let out = SharedOut::new(out);
    let tiles = rows.div_ceil(TILE_ROWS);
    let chunk = if rows * cols < 1 << 15 { tiles } else { 1 };
    pool.each(tiles, chunk, |range| {
        for row in range.start * TILE_ROWS..(range.end * TILE_ROWS).min(rows) {
            let (tile, in_tile) = (row - row % TILE_ROWS, row % TILE_ROWS);
            for k in (0..cols).step_by(BLOCK_K) {
                let (start, tile_rows) = tile_at(rows, cols, k, tile);
                let block = &x[row * cols + k..][..(cols - k).min(BLOCK_K)];
                for (step, x) in block.chunks(STEP).enumerate() {
                    // SAFETY: each row's steps are its own, and each row has one thread.
                    let out = unsafe { out.slice(start + (step * tile_rows + in_tile) * STEP, STEP) };
                    for (out, x) in out.iter_mut().zip(x) {
                        *out = convert(*x);
                    }
                    out[x.len()..].fill(T::zeroed());
                }
            }
        }
    });
}

/// An output that threads write disjoint parts of.
#[derive(Clone, Copy)]
pub(crate) struct SharedOut<T> {
    data: *mut T,
    len: usize,
}

// SAFETY: only `slice` gives access, whose caller vouches that parts are disjoint.
unsafe impl<T: Send> Sync for SharedOut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedOut<T> {}

impl<T> SharedOut<T> {
    pub(crate) fn new(out: &mut [T]) -> Self {
        Self { data: out.as_mut_ptr(), len: out.len() }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// The slice this was made of is still borrowed by the caller's op, and no other access overlaps.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start + len <= self.len, "a part lies within its whole");
        // SAFETY: within bounds by the check, disjoint by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

/// `out [rows, N]` = the packed inputs times the matrix, plus bias.
///
/// # Panics
/// When the inputs were packed for another `K`, or `out` is too short.
pub fn linear(pool: &mut Pool, isa: Isa, out: &mut [f32], x: &PackedInput, matrix: &Matrix) {
    assert_eq!(x.cols, matrix.cols, "inputs have K columns");
    assert!(out.len() >= x.rows * matrix.rows, "outputs are [rows, N]");
    let job = Job { out: SharedOut::new(out), x, matrix };
    let run = kernel(isa, matrix.weight_type);
    let groups = matrix.num_groups();
    // Enough chunks to share evenly, each long enough to stream.
    let chunk = (groups / (8 * pool.threads())).clamp(4, 64);
    pool.each(groups, chunk, |range| {
        // SAFETY: `kernel` chose code this processor has, and chunks of groups are disjoint columns.
        unsafe { run(&job, range) }
    });
}

struct Job<'a> {
    out: SharedOut<f32>,
    x: &'a PackedInput,
    matrix: &'a Matrix,
}

type Kernel = unsafe fn(&Job<'_>, Range<usize>);

fn kernel(_isa: Isa, weight_type: WeightType) -> Kernel {
    match weight_type {
        WeightType::Bf16 => columns_bf16::<Portable<Bf16>>,
        WeightType::F16 => columns_f32::<Portable<F16>>,
        WeightType::F32 => columns_f32::<Portable<F32>>,
    }
}

unsafe fn columns_bf16<D: Dot<X = u16>>(job: &Job<'_>, groups: Range<usize>) {
    // SAFETY: passed on.
    unsafe { columns::<D>(job, &job.x.bf16, groups) }
}

unsafe fn columns_f32<D: Dot<X = f32>>(job: &Job<'_>, groups: Range<usize>) {
    // SAFETY: passed on.
    unsafe { columns::<D>(job, &job.x.f32, groups) }
}

/// All rows of the columns in `groups`.
///
/// # Safety
/// The processor has `D`'s instructions, and no other thread computes these columns.
#[inline(always)]
unsafe fn columns<D: Dot>(job: &Job<'_>, x: &[D::X], groups: Range<usize>) {
    let (rows, cols) = (job.x.rows, job.matrix.cols);
    for k in (0..cols).step_by(BLOCK_K) {
        for first_row in (0..rows).step_by(BLOCK_ROWS) {
            for part in &job.matrix.parts {
                let own = part.first_group..part.first_group + part.groups();
                for group in groups.start.max(own.start)..groups.end.min(own.end) {
                    let row = (group - own.start) * GROUP;
                    let weights = GroupWeights::<D>::new(part, row, k, (cols - k).min(BLOCK_K));
                    for tile in (first_row..rows.min(first_row + BLOCK_ROWS)).step_by(TILE_ROWS) {
                        let (start, tile_rows) = tile_at(rows, cols, k, tile);
                        let x = x[start..].as_ptr();
                        // SAFETY: passed on; `x` holds a whole tile.
                        unsafe {
                            match tile_rows {
                                1 => weights.tile::<1>(job, x, tile, part.first_row + row, k),
                                2 => weights.tile::<2>(job, x, tile, part.first_row + row, k),
                                3 => weights.tile::<3>(job, x, tile, part.first_row + row, k),
                                4 => weights.tile::<4>(job, x, tile, part.first_row + row, k),
                                5 => weights.tile::<5>(job, x, tile, part.first_row + row, k),
                                _ => weights.tile::<6>(job, x, tile, part.first_row + row, k),
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Four rows of weights over one block of `K`; the last row is repeated where there are fewer.
struct GroupWeights<D> {
    rows: [*const u8; GROUP],
    valid: usize,
    steps: usize,
    tail: Option<[[u8; STEP * 4]; GROUP]>, // what is left of `K`, padded with 0
    dot: std::marker::PhantomData<D>,
}

impl<D: Dot> GroupWeights<D> {
    #[inline(always)]
    fn new(part: &Part, row: usize, k: usize, len: usize) -> Self {
        let valid = (part.rows - row).min(GROUP);
        let bytes = |c: usize| {
            &part.data[(row + c.min(valid - 1)) * part.row_bytes + k * D::WEIGHT_BYTES..][..len * D::WEIGHT_BYTES]
        };
        let tail = (!len.is_multiple_of(STEP)).then(|| {
            std::array::from_fn(|c| {
                let rest = &bytes(c)[(len - len % STEP) * D::WEIGHT_BYTES..];
                let mut padded = [0; STEP * 4];
                padded[..rest.len()].copy_from_slice(rest);
                padded
            })
        });
        let rows = std::array::from_fn(|c| bytes(c).as_ptr());
        Self { rows, valid, steps: len / STEP, tail, dot: std::marker::PhantomData }
    }

    /// `R` rows of inputs by four columns; written to, or from the second block of `K` on added to, the output.
    ///
    /// # Safety
    /// The processor has `D`'s instructions; `x` holds a tile of `R` rows; nobody else writes these outputs.
    #[inline(always)]
    unsafe fn tile<const R: usize>(&self, job: &Job<'_>, x: *const D::X, row: usize, col: usize, k: usize) {
        // SAFETY: `new` checked that each row has `steps * STEP` weights, and the caller vouches for `x`.
        let sums = unsafe {
            let mut acc = [[D::zero(); GROUP]; R];
            for step in 0..self.steps {
                let weights = self.rows.map(|row| D::load(row.add(step * STEP * D::WEIGHT_BYTES)));
                add_step::<D, R>(&mut acc, x.add(step * R * STEP), weights);
            }
            if let Some(tail) = &self.tail {
                let weights = std::array::from_fn(|c| D::load(tail[c].as_ptr()));
                add_step::<D, R>(&mut acc, x.add(self.steps * R * STEP), weights);
            }
            acc.map(|acc| D::sum4(acc))
        };
        let stride = job.matrix.rows;
        let last = k + BLOCK_K >= job.matrix.cols;
        let bias = job.matrix.bias.as_ref().filter(|_| last);
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: these columns are this thread's alone.
            let out = unsafe { job.out.slice((row + r) * stride + col, self.valid) };
            for (c, out) in out.iter_mut().enumerate() {
                *out = if k == 0 { sums[c] } else { *out + sums[c] };
                if let Some(bias) = bias {
                    *out += bias[col + c];
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn add_step<D: Dot, const R: usize>(acc: &mut [[D::Acc; GROUP]; R], x: *const D::X, weights: [D::W; GROUP]) {
    for (r, acc) in acc.iter_mut().enumerate() {
        for (acc, weights) in acc.iter_mut().zip(weights) {
            // SAFETY: the caller vouches for `R` rows of 32 inputs.
            *acc = unsafe { D::add(*acc, x.add(r * STEP), weights) };
        }
    }
}
