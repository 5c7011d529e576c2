//! norm: y[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * w                     (RMS: Zhang & Sennrich 2019)
//!       y[t, :] = (x[t, :] - mean) * rsqrt(variance + eps) * w + b               (layer: Ba et al. 2016)
//!
//! x, y    [T, E] f32
//! w, b    [E] f32
//! maths   f32 sums in 16 lanes, in order; the variance is computed from the differences from the mean
//! test    tests/cpu_ops.rs against reference::rms_norm and reference::layer_norm

use std::ops::Range;

use crate::cpu::Pool;
use crate::cpu::shared::SharedOut;

const LANES: usize = 16;

/// Kind and weights of a norm.
#[derive(Debug, Clone, Copy)]
pub enum Norm<'a> {
    /// Divides by the root of the mean square.
    Rms {
        /// `[E]`.
        weight: &'a [f32],
    },
    /// Subtracts the mean, divides by the standard deviation.
    Layer {
        /// `[E]`.
        weight: &'a [f32],
        /// `[E]`.
        bias: &'a [f32],
    },
}

impl Norm<'_> {
    fn width(&self) -> usize {
        match self {
            Norm::Rms { weight } | Norm::Layer { weight, .. } => weight.len(),
        }
    }

    /// Its part for the elements `range`.
    fn part(&self, range: Range<usize>) -> Self {
        match *self {
            Norm::Rms { weight } => Norm::Rms { weight: &weight[range] },
            Norm::Layer { weight, bias } => Norm::Layer { weight: &weight[range.clone()], bias: &bias[range] },
        }
    }
}

/// `out = norm(x)`, row by row.
///
/// # Panics
/// Panics if `out` and `x` differ in length or are not whole rows.
pub fn norm(pool: &mut Pool, out: &mut [f32], x: &[f32], norm: Norm<'_>, eps: f32) {
    assert_eq!(out.len(), x.len(), "outputs are as many as inputs");
    let width = norm.width();
    let out = SharedOut::new(out);
    each_row(pool, x.len(), width, |row| {
        // SAFETY: each row has one thread.
        let out = unsafe { out.slice(row * width, width) };
        out.copy_from_slice(&x[row * width..][..width]);
        normalize(out, norm, eps);
    });
}

/// `residual += sum of partials, in order; out = norm(residual)`, row by row.
///
/// # Panics
/// Panics if lengths differ or are not whole rows.
pub fn add_norm(pool: &mut Pool, out: &mut [f32], residual: &mut [f32], partials: &[&[f32]], norm: Norm<'_>, eps: f32) {
    assert_eq!(out.len(), residual.len(), "outputs are as many as inputs");
    assert!(partials.iter().all(|partial| partial.len() >= out.len()), "partial sums are as many as outputs");
    let (len, width) = (out.len(), norm.width());
    let (out, residual) = (SharedOut::new(out), SharedOut::new(residual));
    each_row(pool, len, width, |row| {
        // SAFETY: each row has one thread.
        let (out, residual) = unsafe { (out.slice(row * width, width), residual.slice(row * width, width)) };
        sum_into(out, partials, row * width);
        for (residual, sum) in residual.iter_mut().zip(&mut *out) {
            *residual += *sum;
            *sum = *residual;
        }
        normalize(out, norm, eps);
    });
}

/// `residual += branch(sum of partials, in order)`, row by row; then, if `next` is set, its first part becomes the norm
/// of `residual` by its second. `scratch` is as long as `residual`.
///
/// # Panics
/// Panics if lengths differ or are not whole rows.
pub fn add_normed(
    pool: &mut Pool,
    residual: &mut [f32],
    scratch: &mut [f32],
    partials: &[&[f32]],
    branch: Norm<'_>,
    next: Option<(&mut [f32], Norm<'_>)>,
    eps: f32,
) {
    assert_eq!(scratch.len(), residual.len(), "the scratch is as long as the residual");
    assert!(partials.iter().all(|partial| partial.len() >= residual.len()), "partial sums are as many as outputs");
    let (len, width) = (residual.len(), branch.width());
    let (shared, scratch) = (SharedOut::new(residual), SharedOut::new(scratch));
    each_row(pool, len, width, |row| {
        // SAFETY: each row has one thread.
        let (residual, scratch) = unsafe { (shared.slice(row * width, width), scratch.slice(row * width, width)) };
        sum_into(scratch, partials, row * width);
        normalize(scratch, branch, eps);
        residual.iter_mut().zip(scratch).for_each(|(residual, branch)| *residual += *branch);
    });
    if let Some((out, weight)) = next {
        norm(pool, out, residual, weight, eps);
    }
}

/// The heads at the start of each row of `qkv`: query heads, key heads, and as many value heads as key heads.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Distance in elements from one row to the next.
    pub stride: usize,
    /// Number of query heads and of key heads.
    pub counts: [usize; 2],
    /// Elements of a head.
    pub dim: usize,
}

impl Heads {
    /// Elements of all query heads, and of all key heads.
    fn widths(&self) -> [usize; 2] {
        self.counts.map(|count| count * self.dim)
    }
}

/// Norms, in place, of each query head by the first norm, and where there are more norms, of each key head by the second
/// and of each value head by the third. A norm has the weights of one head, which are used for all, or those of all
/// heads.
///
/// # Panics
/// Panics if a row is too short for its heads, if `x` is not whole rows, or if a norm has another number of weights.
pub fn head_norm(pool: &mut Pool, x: &mut [f32], heads: Heads, norms: &[Norm<'_>], eps: f32) {
    let ([q, k], dim) = (heads.widths(), heads.dim);
    let widths = [q, k, k];
    assert!(norms.len() <= widths.len(), "norms of q, k and v");
    let width: usize = widths[..norms.len()].iter().sum();
    assert!(width <= heads.stride, "a row holds its heads");
    for (norm, width) in norms.iter().zip(widths) {
        assert!(norm.width() == dim || norm.width() == width, "weights of one head or of all");
    }
    let len = x.len();
    let x = SharedOut::new(x);
    each_row(pool, len, heads.stride, |row| {
        // SAFETY: each row has one thread.
        let mut rest = unsafe { x.slice(row * heads.stride, width) };
        for (norm, width) in norms.iter().zip(widths) {
            let (own, others) = rest.split_at_mut(width);
            for (index, head) in own.chunks_exact_mut(dim).enumerate() {
                let start = if norm.width() == dim { 0 } else { index * dim };
                normalize(head, norm.part(start..start + dim), eps);
            }
            rest = others;
        }
    });
}

/// For each row of `x`, the sum of squares of all its query heads and of all its key heads: `[T, 2]`.
///
/// # Panics
/// Panics if a row is too short for its heads, or if `x` is not whole rows.
pub fn head_squares(pool: &mut Pool, x: &[f32], heads: Heads) -> Vec<f32> {
    let [q, k] = heads.widths();
    assert!(q + k <= heads.stride, "a row holds its heads");
    let mut sums = vec![0.0; x.len() / heads.stride * 2];
    let out = SharedOut::new(&mut sums);
    each_row(pool, x.len(), heads.stride, |row| {
        let x = &x[row * heads.stride..][..q + k];
        // SAFETY: each row has one thread.
        let out = unsafe { out.slice(2 * row, 2) };
        let (of_q, of_k) = out.split_at_mut(1);
        squares(of_q, &x[..q]);
        squares(of_k, &x[q..]);
    });
    sums
}

/// Scales the query and key heads of each row of `x` by `rsqrt(mean + eps)`, with the means `[T, 2]`, and by their
/// weights `[H D]` and `[K D]`.
///
/// # Panics
/// Panics if lengths differ.
pub fn scale_heads(pool: &mut Pool, x: &mut [f32], heads: Heads, means: &[f32], weights: [&[f32]; 2], eps: f32) {
    let widths = heads.widths();
    assert!(widths == weights.map(<[f32]>::len) && widths[0] + widths[1] <= heads.stride, "a weight for each element");
    let len = x.len();
    assert_eq!(means.len(), len / heads.stride * 2, "two means for each row");
    let x = SharedOut::new(x);
    each_row(pool, len, heads.stride, |row| {
        // SAFETY: each row has one thread.
        let x = unsafe { x.slice(row * heads.stride, widths[0] + widths[1]) };
        let (q, k) = x.split_at_mut(widths[0]);
        for ((x, weights), mean) in [q, k].into_iter().zip(weights).zip(&means[2 * row..]) {
            let scale = 1.0 / (mean + eps).sqrt();
            x.iter_mut().zip(weights).for_each(|(x, weight)| *x = *x * scale * weight);
        }
    });
}

/// `out = partials[0][start..] + partials[1][start..] + …`
fn sum_into(out: &mut [f32], partials: &[&[f32]], start: usize) {
    out.copy_from_slice(&partials[0][start..start + out.len()]);
    for partial in &partials[1..] {
        for (out, partial) in out.iter_mut().zip(&partial[start..]) {
            *out += partial;
        }
    }
}

fn each_row(pool: &mut Pool, len: usize, width: usize, job: impl Fn(usize) + Sync) {
    assert!(len.is_multiple_of(width), "inputs are whole rows");
    let rows = len / width;
    let chunk = if len < 1 << 14 { rows } else { rows.div_ceil(4 * pool.threads()) };
    pool.each(rows, chunk.max(1), |range| range.for_each(&job));
}

for_each_isa! {
    pub(super) fn normalize(x: &mut [f32], norm: Norm<'_>, eps: f32) {
        match norm {
            Norm::Rms { weight } => {
                let scale = 1.0 / (mean(x, |x| x * x) + eps).sqrt();
                for (x, weight) in x.iter_mut().zip(weight) {
                    *x = *x * scale * weight;
                }
            }
            Norm::Layer { weight, bias } => {
                let centre = mean(x, |x| x);
                let scale = 1.0 / (mean(x, |x| (x - centre) * (x - centre)) + eps).sqrt();
                for ((x, weight), bias) in x.iter_mut().zip(weight).zip(bias) {
                    *x = (*x - centre) * scale * weight + bias;
                }
            }
        }
    }
}

for_each_isa! {
    fn squares(out: &mut [f32], x: &[f32]) {
        out[0] = sum(x, |x| x * x);
    }
}

/// Mean of `term` over `x`.
#[inline(always)]
fn mean(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    sum(x, term) / x.len() as f32
}

/// Sum of `term` over `x`.
#[inline(always)]
fn sum(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += term(chunk[lane]);
        }
    }
    let tail: f32 = rest.iter().map(|x| term(*x)).sum();
    lanes.iter().sum::<f32>() + tail
}
