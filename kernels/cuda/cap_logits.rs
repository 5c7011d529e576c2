//! Caps logits. Kernel: `cap_logits.cu`.

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// `x[i] = cap * tanh(x[i] / cap)` for all f32 of `x`, whose number is a multiple of 4.
pub fn cap_logits(q: &Queue, x: Span, cap: f32) -> Result<(), CudaError> {
    let (op, count) = ("cap_logits", x.count::<f32>());
    ensure!(op, count > 0 && count.is_multiple_of(4) && x.is_aligned(16), "{count} elements; a multiple of 4, aligned");
    ensure!(op, cap > 0.0 && cap.is_finite(), "cap {cap}");
    let fourths = count / 4;
    q.launch(
        "cap_logits_f32",
        Launch::new(fourths.div_ceil(256) as u32, 256),
        &[x.into(), (fourths as u64).into(), cap.into()],
    )
}
