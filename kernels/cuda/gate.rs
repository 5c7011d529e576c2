//! Gates the output of attention. Kernel: `gate.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// `x[i] *= sigmoid(gates[i])` for the first `count` elements, a multiple of 8.
pub fn gate(q: &Queue, x: Span, gates: Span, count: usize) -> Result<(), CudaError> {
    let op = "gate";
    ensure!(op, count > 0 && count.is_multiple_of(8), "{count} elements; a multiple of 8");
    ensure!(op, x.count::<bf16>() >= count, "x is shorter than {count}");
    ensure!(op, gates.count::<bf16>() >= count, "gates are shorter than {count}");
    ensure!(op, x.is_aligned(16) && gates.is_aligned(16), "an operand is not 16-byte aligned");
    let eighths = count / 8;
    let args = [x.into(), gates.into(), (eighths as u64).into()];
    q.launch("gate_bf16", Launch::new(eighths.div_ceil(256) as u32, 256), &args)
}
