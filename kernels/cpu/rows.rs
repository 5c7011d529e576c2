//! Calls a function for each row of a matrix, distributed over the pool.

use std::sync::OnceLock;

use crate::cpu::Pool;
use crate::cpu::shared::SharedOut;

/// `job(i, row i)` for every row of `x [rows, width]`; the results are in row order.
///
/// # Panics
/// Panics if `x` is not whole rows.
pub fn map_rows<T: Send + Sync>(
    pool: &mut Pool,
    x: &mut [f32],
    width: usize,
    job: impl Fn(usize, &mut [f32]) -> T + Sync,
) -> Vec<T> {
    assert!(x.len().is_multiple_of(width), "inputs are whole rows");
    let rows = x.len() / width;
    let results: Vec<OnceLock<T>> = (0..rows).map(|_| OnceLock::new()).collect();
    let x = SharedOut::new(x);
    pool.each(rows, 1, |range| {
        for row in range {
            // SAFETY: each row has one thread.
            let result = job(row, unsafe { x.slice(row * width, width) });
            let _ = results[row].set(result); // Each row is set once.
        }
    });
    results.into_iter().map(|result| result.into_inner().expect("every row was given a result")).collect()
}
