//! How decode attention divides rows among thread blocks, and the memory for the sums of the parts.

use std::sync::Arc;

use super::rope_cache::HeadShape;
use super::{CudaError, DeviceBuffer, Gpu};

/// Number of query heads that one thread block computes.
pub(super) const GROUP: usize = 8;
/// Maximum number of thread blocks in a cluster.
pub(super) const MAX_CLUSTER: usize = 8;
/// Rows of a launch that divides by length, at most.
pub(super) const ROWS_BY_LENGTH: usize = 256;

/// What the division of a row depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// The number of rows of the launch: the fastest.
    ByRows,
    /// The row's length alone, so that the result of a row has the same bits whatever the other rows are.
    ByLength,
}

/// How rows are divided among thread blocks. It depends only on the bucket, so that a graph can be replayed for any
/// lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Splits {
    /// Maximum number of parts of a row.
    pub splits: usize,
    /// Number of blocks for the parts of a row, each of which computes every `blocks`-th part. No result depends on it. Fewer than
    /// `splits` on Hopper alone. The ring has its own number of blocks.
    pub blocks: usize,
    /// Minimum number of positions in a part, a multiple of 16.
    pub min_chunk: usize,
    /// Number of parts whose thread blocks share a cluster, on Hopper and later: a power of two up to eight
    /// that divides `splits`. The parts of a row with no more parts than this are combined within the cluster.
    pub cluster: usize,
    /// In the ring, one block computes all parts of a row of up to this length. No result depends on it.
    pub whole_len: usize,
}

impl Splits {
    /// The division of [`Division::ByLength`]: parts are the same for any number of rows; only the number of blocks differs.
    pub fn by_length(num_rows: usize, shape: HeadShape) -> Self {
        let (splits, visits) = (16, visits(num_rows, shape));
        // Blocks without a part take time, too.
        let blocks = (2048 / visits.max(1)).next_power_of_two().clamp(1, splits);
        // Parts that different blocks compute take 3 us more of a block each, but few rows need many blocks.
        let whole_len = match visits {
            0..48 => 0,
            48..192 => 256,
            192..512 => 1024,
            _ => 2048,
        };
        Self { splits, blocks, min_chunk: 128, cluster: 1, whole_len }
    }

    /// The division of [`Division::ByRows`], by measurement on an H200 (kernels/README.md).
    pub fn for_rows(num_rows: usize, shape: HeadShape) -> Self {
        let blocks = visits(num_rows, shape);
        let splits = (256 / blocks.max(1)).next_power_of_two().clamp(4, 64);
        let (min_chunk, cluster) = match blocks {
            0..48 => (64, splits.min(MAX_CLUSTER)),
            48..192 => (256, 1),
            _ => (1024, 1),
        };
        Self { splits, blocks: splits, min_chunk, cluster, whole_len: 0 }
    }
}

/// Partial sums and counters of [`super::decode_attention::decode_attention`]. Only one call at a time may use it.
#[derive(Debug)]
pub struct DecodeWorkspace {
    pub(super) division: Division,
    pub(super) partial: DeviceBuffer,
    /// One for each group of heads of a row, then those of the ring.
    pub(super) counters: DeviceBuffer,
    pub(super) max_visits: usize,
}

impl DecodeWorkspace {
    /// A workspace for up to `max_rows` rows of layers of these shapes.
    pub fn new(gpu: &Arc<Gpu>, max_rows: usize, shapes: &[HeadShape], division: Division) -> Result<Self, CudaError> {
        let (partial_bytes, max_visits) = sizes(max_rows, shapes, division);
        let counters = DeviceBuffer::from_slice(gpu, &vec![0u32; max_visits + 1])?;
        Ok(Self { division, partial: DeviceBuffer::new(gpu, partial_bytes)?, counters, max_visits })
    }

    /// Bytes that [`DecodeWorkspace::new`] allocates.
    pub fn bytes(max_rows: usize, shapes: &[HeadShape], division: Division) -> usize {
        let (partial_bytes, max_visits) = sizes(max_rows, shapes, division);
        partial_bytes + (max_visits + 1) * 4
    }
}

/// Bytes of the partial sums, and the number of counters.
fn sizes(max_rows: usize, shapes: &[HeadShape], division: Division) -> (usize, usize) {
    let mut distinct = shapes.to_vec();
    distinct.dedup();
    let largest = |of: &dyn Fn(HeadShape) -> usize| distinct.iter().copied().map(of).max().unwrap_or_default();
    (largest(&|shape| partial_bytes(max_rows, shape, division)), largest(&|shape| visits(max_rows, shape)))
}

/// Number of query head groups of all KV heads of the rows.
pub(super) fn visits(rows: usize, shape: HeadShape) -> usize {
    rows * shape.num_kv_heads * groups(shape)
}

/// Number of groups of query heads that share a KV head.
pub(super) fn groups(shape: HeadShape) -> usize {
    (shape.num_heads / shape.num_kv_heads.max(1)).div_ceil(GROUP)
}

/// The largest size for any number of rows up to `max_rows`: by rows, fewer rows have more splits each.
fn partial_bytes(max_rows: usize, shape: HeadShape, division: Division) -> usize {
    let of = |rows: usize, splits: Splits| rows * splits.splits * shape.num_heads * (shape.head_dim + 2) * 4;
    match division {
        Division::ByRows => (1..=max_rows).map(|rows| of(rows, Splits::for_rows(rows, shape))).max().unwrap_or(0),
        Division::ByLength => of(max_rows.min(ROWS_BY_LENGTH), Splits::by_length(max_rows, shape)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_holds_the_parts_of_every_number_of_rows() {
        let shape = HeadShape { num_heads: 32, num_kv_heads: 8, head_dim: 128, block_size: 64, has_kv: true };
        let row = |splits: usize| splits * 32 * (128 + 2) * 4;
        // By rows: 32 parts of one row, 4 from 64 rows on. By length: 16 parts of up to 256 rows of a launch.
        assert_eq!(sizes(1, &[shape], Division::ByRows), (row(32), 8));
        assert_eq!(sizes(256, &[shape], Division::ByRows), (256 * row(4), 256 * 8));
        assert_eq!(sizes(8, &[shape], Division::ByLength), (8 * row(16), 8 * 8));
        assert_eq!(sizes(1024, &[shape], Division::ByLength), (256 * row(16), 1024 * 8));
        assert_eq!(sizes(1024, &[], Division::ByLength), (0, 0));
    }
}
