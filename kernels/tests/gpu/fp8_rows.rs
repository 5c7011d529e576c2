//! Rows in e4m3 with a scale for each slice, and their values.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::quantize_rows::{Fp8Rows, quantize_rows};
use kernels::cuda::{DeviceBuffer, Gpu, Queue};

use crate::gpu::poisoned;
use crate::quantized::e4m3;

/// Columns of a slice.
const SLICE: usize = 128;

/// The least power of two `s` with `size / s <= 448`; at least 2^-126.
pub fn scale_for(size: f32) -> f32 {
    let mut scale = 2f32.powi(-126);
    while size / scale > 448.0 {
        scale *= 2.0;
    }
    scale
}

/// The nearest value of e4m3; of two, the one whose code is even.
pub fn rounded(value: f32) -> f32 {
    let codes = (0..=0x7eu8).map(e4m3);
    let size = value.abs();
    let best = codes.enumerate().min_by(|a, b| {
        let distance = |code: &(usize, f32)| (f64::from(code.1) - f64::from(size)).abs();
        distance(a).total_cmp(&distance(b)).then((a.0 % 2).cmp(&(b.0 % 2)))
    });
    best.map_or(0.0, |(_, found)| found.copysign(value))
}

/// The values that remain of rows of `k` columns.
pub fn quantized_values(x: &[f32], k: usize) -> Vec<f32> {
    let slices = x.chunks(k).flat_map(|row| row.chunks(SLICE));
    let values = slices.flat_map(|slice| {
        let scale = scale_for(slice.iter().fold(0.0, |size: f32, v| size.max(v.abs())));
        slice.iter().map(move |v| rounded(v / scale) * scale)
    });
    values.collect()
}

/// Rows of `k` columns on the GPU in e4m3.
pub fn quantize((gpu, queue): (&Arc<Gpu>, &Queue), x: &[bf16], k: usize) -> (DeviceBuffer, Fp8Rows) {
    let rows = x.len() / k;
    let from = DeviceBuffer::from_slice(gpu, x).expect("memory");
    let buffer = poisoned::<u8>(gpu, queue, Fp8Rows::bytes(rows, k));
    let quantized = Fp8Rows::in_buffer(buffer.span(), rows, k);
    quantize_rows(queue, quantized, from.span(), rows, k).expect("a launch");
    queue.wait().expect("the kernel runs");
    (buffer, quantized)
}
