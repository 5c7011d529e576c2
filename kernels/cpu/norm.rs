//! norm: y[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * w                     (RMS: Zhang & Sennrich 2019)
//!       y[t, :] = (x[t, :] - mean) * rsqrt(variance + eps) * w + b               (layer: Ba et al. 2016)
//!
//! x, y    [T, E] f32
//! w, b    [E] f32
//! maths   f32 sums in 16 lanes, in order; the variance is computed from the differences from the mean
//! test    tests/cpu_ops.rs against reference::rms_norm and reference::layer_norm

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

/// RMS norm, in place, of the heads at the start of each row of `x` (`stride` elements apart). There are `heads[i]`
/// heads as wide as `weights[i]`, which are normalized with it; heads of the first kind come first.
///
/// # Panics
/// Panics if a row is too short for its heads, or if `x` is not whole rows.
pub fn head_norm(pool: &mut Pool, x: &mut [f32], stride: usize, heads: [usize; 2], weights: [&[f32]; 2], eps: f32) {
    let width: usize = heads.iter().zip(weights).map(|(count, weight)| count * weight.len()).sum();
    assert!(width <= stride, "a row holds its heads");
    let len = x.len();
    let x = SharedOut::new(x);
    each_row(pool, len, stride, |row| {
        // SAFETY: each row has one thread.
        let mut rest = unsafe { x.slice(row * stride, width) };
        for (count, weight) in heads.into_iter().zip(weights) {
            let (own, others) = rest.split_at_mut(count * weight.len());
            own.chunks_exact_mut(weight.len()).for_each(|head| normalize(head, Norm::Rms { weight }, eps));
            rest = others;
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
    fn normalize(x: &mut [f32], norm: Norm<'_>, eps: f32) {
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

/// Mean of `term` over `x`.
#[inline(always)]
fn mean(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += term(chunk[lane]);
        }
    }
    let tail: f32 = rest.iter().map(|x| term(*x)).sum();
    (lanes.iter().sum::<f32>() + tail) / x.len() as f32
}
