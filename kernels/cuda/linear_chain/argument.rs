//! The kernel's argument, made of checked links.

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::{
    AddBranch, AddNorm, BRANCH_SUMS, BranchBefore, Link, LinkEnd, LinkWeight, MAX_LINKS, OP, RowScale, SLICE, TILE,
    branch_squares_bytes, norm_slices,
};
use crate::cuda::error::ensure;
use crate::cuda::quantized_gemm::{check_product, meta_argument};
use crate::cuda::skinny_gemm::{self, Epilogue};
use crate::cuda::tensor_map::TensorMap;
use crate::cuda::{CudaError, Span};

/// Values of the kernel's `epilogue` besides those of [`Epilogue`].
const ADD_NORM: u32 = 4;
const ADD_BRANCH: u32 = 5;

impl Link {
    /// The kernel's `Link`, after a check that the operands have `rows` rows.
    pub(super) fn argument(&self, rows: usize, width: usize) -> Result<LinkArgument, CudaError> {
        let Self { y, pitch, x, linear, end, scale } = *self;
        let [n, k] = linear.shape();
        let epilogue = match end {
            LinkEnd::Store(epilogue) => epilogue,
            LinkEnd::AddNorm(_) | LinkEnd::AddBranch(_) => Epilogue::Store,
        };
        let rows_of_x = if scale.is_some_and(|scale| scale.is_of_branch) { 2 * rows } else { rows };
        ensure!(OP, x.count::<bf16>() >= rows_of_x * k, "x has no {rows_of_x} rows of {k}");
        let (weight, bias, meta) = match linear {
            LinkWeight::Plain(plain) => {
                skinny_gemm::check(y, x, &plain, rows, epilogue)?;
                (TensorMap::matrix(plain.weight, n, k, TILE, SLICE)?, plain.bias, [0; 2])
            }
            LinkWeight::Packed(packed) => {
                check_product(y, x, &packed, rows, epilogue)?;
                let map = TensorMap::bytes_matrix(packed.codes, n, packed.format.row_bytes(k), TILE, 128)?;
                (map, packed.bias, meta_argument(packed.scales, packed.format))
            }
        };
        if let LinkEnd::Store(Epilogue::Store | Epilogue::StoreF32) = end {
            let bytes = if epilogue == Epilogue::StoreF32 { 4 } else { 2 };
            let fits = pitch >= n && pitch.is_multiple_of(8) && y.bytes() >= ((rows - 1) * pitch + n) * bytes;
            ensure!(OP, fits, "y does not hold {rows} rows of {n} outputs, {pitch} apart");
        }
        let mut argument = LinkArgument {
            weight: map_words(&weight),
            x: map_words(&TensorMap::matrix(x, rows_of_x, k, width, SLICE)?),
            y: y.address(),
            bias: bias.address(),
            m: rows as u32,
            n: n as u32,
            epilogue: epilogue.code(),
            pitch: pitch as u32,
            k: k as u32,
            meta,
            ..LinkArgument::zeroed()
        };
        match end {
            LinkEnd::Store(_) => {}
            LinkEnd::AddNorm(add) => add.fill(&mut argument, y, rows, n)?,
            LinkEnd::AddBranch(add) => {
                ensure!(OP, scale.is_none(), "a branch of rows without their scale");
                add.fill(&mut argument, y, rows, n)?;
            }
        }
        if let Some(scale) = scale {
            scale.fill(&mut argument, rows, k)?;
        }
        Ok(argument)
    }
}

impl RowScale {
    /// For `rows` rows of `expected` columns.
    fn fill(&self, argument: &mut LinkArgument, rows: usize, expected: usize) -> Result<(), CudaError> {
        let Self { squares, cols, eps, is_of_branch } = *self;
        let found = squares.count::<f32>();
        let sums = if is_of_branch { BRANCH_SUMS } else { 1 };
        let fits = cols == expected && found >= rows * norm_slices(cols) * sums;
        ensure!(OP, fits, "{found} squares of {rows} rows of {cols} columns, for {expected} inputs");
        argument.squares_in = squares.address();
        argument.slices_in = norm_slices(cols) as u32;
        argument.inverse_cols = 1.0 / cols as f32;
        argument.eps = eps;
        Ok(())
    }
}

impl AddBranch {
    fn fill(&self, argument: &mut LinkArgument, y: Span, rows: usize, n: usize) -> Result<(), CudaError> {
        let Self { residual, branch, branch_gain, before, gain, squares } = *self;
        let has_room = |span: Span, count: usize| span.count::<bf16>() >= count && span.is_aligned(8);
        let fits = has_room(residual, rows * n) && has_room(branch, rows * n) && has_room(y, 2 * rows * n);
        ensure!(OP, fits, "the residual, the branch or y is too short for {rows} rows of {n}, or not 8-byte aligned");
        let gains = [Some(branch_gain), Some(gain), before.map(|before| before.gain)];
        ensure!(OP, gains.into_iter().flatten().all(|gain| has_room(gain, n)), "a norm's weight is shorter than {n}");
        let found = squares.bytes();
        ensure!(OP, found >= branch_squares_bytes(rows, n), "{found} bytes of squares of {rows} x {n}");
        let same = [residual, branch].iter().any(|span| span.address() == y.address());
        ensure!(OP, !same && residual.address() != branch.address(), "two buffers are one");
        argument.epilogue = ADD_BRANCH;
        argument.residual = residual.address();
        argument.gain = gain.address();
        argument.squares_out = squares.address();
        argument.slices_out = norm_slices(n) as u32;
        argument.branch = branch.address();
        argument.branch_gain = branch_gain.address();
        if let Some(BranchBefore { gain, scale }) = before {
            ensure!(OP, scale.squares.address() != squares.address(), "the squares of two branches are one buffer");
            ensure!(OP, scale.is_of_branch, "the branch before has no squares of its own");
            scale.fill(argument, rows, n)?;
            argument.gain_before = gain.address();
        }
        Ok(())
    }
}

impl AddNorm {
    fn fill(&self, argument: &mut LinkArgument, y: Span, rows: usize, n: usize) -> Result<(), CudaError> {
        let Self { residual, gain, squares } = *self;
        let fits = residual.count::<bf16>() >= rows * n && gain.count::<bf16>() >= n;
        ensure!(OP, fits, "the residual or the norm's weight is too short for {rows} rows of {n}");
        let found = squares.count::<f32>();
        ensure!(OP, found >= rows * norm_slices(n), "{found} squares of {rows} x {}", norm_slices(n));
        ensure!(OP, residual.is_aligned(8) && gain.is_aligned(8), "a buffer is not 8-byte aligned");
        ensure!(OP, y.address() != residual.address(), "y and residual are one buffer");
        argument.epilogue = ADD_NORM;
        argument.residual = residual.address();
        argument.gain = gain.address();
        argument.squares_out = squares.address();
        argument.slices_out = norm_slices(n) as u32;
        Ok(())
    }
}

fn map_words(map: &TensorMap) -> [u64; 16] {
    bytemuck::pod_read_unaligned(map.bytes())
}

/// The kernel's `Link`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct LinkArgument {
    weight: [u64; 16],
    x: [u64; 16],
    y: u64,
    bias: u64,
    m: u32,
    n: u32,
    epilogue: u32,
    pitch: u32,
    squares_in: u64,
    residual: u64,
    gain: u64,
    squares_out: u64,
    slices_in: u32,
    slices_out: u32,
    inverse_cols: f32,
    eps: f32,
    k: u32,
    padding: u32,
    meta: [u64; 2],
    branch: u64,
    branch_gain: u64,
    gain_before: u64,
}

/// The kernel's `Chain`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ChainArgument {
    pub(super) links: [LinkArgument; MAX_LINKS],
    pub(super) peers: [u64; 14],
    pub(super) packets: u64,
    pub(super) arrivals: u64,
    pub(super) epochs: u64,
    pub(super) count: u32,
    pub(super) stages: u32,
    pub(super) padding: [u32; 12],
}

const _: () = assert!(size_of::<LinkArgument>() == 384 && size_of::<ChainArgument>() == 4 * 384 + 192);
