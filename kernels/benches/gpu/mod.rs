//! Common parts of GPU benches: timing with graphs, and random contents.
#![allow(dead_code)] // Each bench uses only a part.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::{CudaError, DeviceBuffer, Event, Gpu, Queue};

/// Several times the size of any L2 cache: buffers used in rotation over this size are read from memory.
pub const ROTATED_BYTES: usize = 400 << 20;

/// The first GPU and a queue on it. Prints a message and returns `None` if there is none.
pub fn open() -> Option<(Arc<Gpu>, Queue)> {
    match Gpu::count() {
        Ok(0) => {
            println!("skipped: no CUDA device");
            return None;
        }
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
        Ok(_) => {}
    }
    let gpu = Gpu::open(0).expect("a GPU that the driver shows can be opened");
    let queue = Queue::new(&gpu).expect("a queue");
    println!("{}, medians of 15 graphs", gpu.name());
    Some((gpu, queue))
}

/// bf16 values in [-1, 1), without special values.
pub fn random(gpu: &Arc<Gpu>, count: usize) -> DeviceBuffer {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    let page: Vec<bf16> = (0..count.min(1 << 20)).map(|_| next()).collect();
    let buffer = DeviceBuffer::with_count::<bf16>(gpu, count).expect("memory");
    for start in (0..count).step_by(page.len().max(1)) {
        let part = (count - start).min(page.len());
        buffer.span().elements::<bf16>(start, part).write(&page[..part]).expect("a copy");
    }
    buffer
}

/// Microseconds of one call, measured with a graph of `calls` consecutive calls; call `i` gets `i`.
pub fn microseconds(queue: &Queue, calls: usize, call: impl Fn(usize) -> Result<(), CudaError>) -> f64 {
    (0..calls).try_for_each(&call).expect("launches");
    queue.wait().expect("the kernels run");
    let graph = queue.capture(|| (0..calls).try_for_each(&call)).expect("a graph");
    let (begin, end) = (Event::new(true).expect("an event"), Event::new(true).expect("an event"));
    let mut times: Vec<f64> = (0..15)
        .map(|_| {
            begin.record(queue).expect("a mark");
            queue.replay(&graph).expect("a replay");
            end.record(queue).expect("a mark");
            queue.wait().expect("the graph runs");
            f64::from(end.ms_since(&begin).expect("a time")) * 1000.0 / calls as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
