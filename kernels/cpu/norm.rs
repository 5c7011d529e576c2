//! rms_norm: y[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * w      (Zhang & Sennrich 2019)
//!
//! x, y    [T, E] f32
//! w       [E] f32
//! maths   f32 sum of squares in 16 lanes, in order
//! test    tests/cpu_ops.rs against reference::rms_norm

use crate::cpu::Pool;
use crate::cpu::shared::SharedOut;

const LANES: usize = 16;

/// `out = x * rsqrt(mean(x^2) + eps) * weight`, row by row.
///
/// # Panics
/// When `out` and `x` differ in length or are not whole rows.
pub fn rms_norm(pool: &mut Pool, out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    assert_eq!(out.len(), x.len(), "outputs are as many as inputs");
    let width = weight.len();
    let out = SharedOut::new(out);
    each_row(pool, x.len(), width, |row| {
        // SAFETY: each row has one thread.
        let out = unsafe { out.slice(row * width, width) };
        normalize(out, &x[row * width..][..width], weight, eps);
    });
}

/// `residual += sum of partials, in order; out = rms_norm(residual)`, row by row.
///
/// # Panics
/// When lengths differ or are not whole rows.
pub fn add_rms_norm(
    pool: &mut Pool,
    out: &mut [f32],
    residual: &mut [f32],
    partials: &[&[f32]],
    weight: &[f32],
    eps: f32,
) {
    assert_eq!(out.len(), residual.len(), "outputs are as many as inputs");
    assert!(partials.iter().all(|partial| partial.len() >= out.len()), "partial sums are as many as outputs");
    let (len, width) = (out.len(), weight.len());
    let (out, residual) = (SharedOut::new(out), SharedOut::new(residual));
    each_row(pool, len, width, |row| {
        // SAFETY: each row has one thread.
        let (out, residual) = unsafe { (out.slice(row * width, width), residual.slice(row * width, width)) };
        sum_into(out, partials, row * width);
        for (residual, sum) in residual.iter_mut().zip(&*out) {
            *residual += sum;
        }
        normalize(out, residual, weight, eps);
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

fn normalize(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let mut lanes = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane] * chunk[lane];
        }
    }
    let tail: f32 = rest.iter().map(|x| x * x).sum();
    let mean = (lanes.iter().sum::<f32>() + tail) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}
