//! The default size of host memory for what is evicted from devices: shares of what the host has free.

use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The part of the host's free memory that all ranks together may use.
const PART: u64 = 4;

/// Most bytes of host memory for each byte of the cache on the device.
const PER_CACHE_BYTE: u64 = 2;

/// Most bytes of a rank. A worker that is killed comes back 0.08 s later for each GiB, since its memory is unpinned first (docs/scheduling.md).
const MOST: u64 = 16 << 30;

/// A quarter of the memory that a host has free when the world starts, in equal shares for its ranks, of 16 GiB at most. The models of a
/// rank take parts of its share, and give them back when they are unloaded.
#[derive(Debug)]
pub struct HostShare {
    /// What models have left of each rank's share.
    left: Mutex<Vec<u64>>,
}

impl HostShare {
    /// Shares of `free_bytes` for the ranks of a world, of which a host has `ranks_per_node` at most.
    pub fn new(free_bytes: u64, ranks_per_node: u32, world_size: u32) -> Self {
        let bytes = (free_bytes / PART / u64::from(ranks_per_node.max(1))).min(MOST);
        Self { left: Mutex::new(vec![bytes; world_size as usize]) }
    }

    /// Bytes that the rank with the most has left.
    pub(crate) fn most(&self) -> u64 {
        ipc::lock(&self.left).iter().copied().max().unwrap_or(0)
    }

    /// Bytes that each of these ranks has left; 0 if there is none of them.
    pub(crate) fn left(&self, ranks: Range<u32>) -> u64 {
        let left = ipc::lock(&self.left);
        let of_ranks = left.get(ranks.start as usize..ranks.end as usize).unwrap_or_default();
        of_ranks.iter().copied().min().unwrap_or(0)
    }

    /// Takes the same bytes of the share of each of these ranks, for workers whose caches have `cache_bytes` at most.
    pub(crate) fn take(self: &Arc<Self>, ranks: Range<u32>, cache_bytes: u64) -> TakenShare {
        let mut left = ipc::lock(&self.left);
        let own = left.get_mut(ranks.start as usize..ranks.end as usize).unwrap_or_default();
        let bytes = most_of_share(own.iter().copied().min().unwrap_or(0), cache_bytes);
        own.iter_mut().for_each(|left| *left -= bytes);
        drop(left);
        TakenShare { share: Arc::clone(self), ranks, bytes }
    }
}

/// Most bytes of a worker with this cache, where each rank has `left`.
pub(crate) fn most_of_share(left: u64, cache_bytes: u64) -> u64 {
    left.min(cache_bytes.saturating_mul(PER_CACHE_BYTE))
}

/// What a replica has of the shares of its ranks.
#[derive(Debug)]
pub(crate) struct TakenShare {
    share: Arc<HostShare>,
    ranks: Range<u32>,
    bytes: u64,
}

impl TakenShare {
    /// Bytes of each rank.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for TakenShare {
    fn drop(&mut self) {
        let mut left = ipc::lock(&self.share.left);
        let own = left.get_mut(self.ranks.start as usize..self.ranks.end as usize).unwrap_or_default();
        own.iter_mut().for_each(|left| *left += self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_ranks_of_a_host_divide_a_quarter_of_its_free_memory() {
        let share = Arc::new(HostShare::new(256 * GIB, 8, 16));
        assert_eq!(share.left(0..16), 8 * GIB);
        let taken: Vec<_> = (0..16).map(|rank| share.take(rank..rank + 1, 1000 * GIB)).collect();
        let of_host: u64 = taken[..8].iter().map(TakenShare::bytes).sum();
        assert_eq!(of_host, 64 * GIB);
        assert_eq!(share.left(3..5), 0);
        assert_eq!(HostShare::new(0, 8, 8).left(0..8), 0, "the free memory is unknown");
        assert_eq!(HostShare::new(2048 * GIB, 8, 8).left(0..8), MOST);
    }

    #[test]
    fn a_worker_takes_twice_its_cache_at_most() {
        let share = Arc::new(HostShare::new(60 * GIB, 1, 1));
        assert_eq!(share.take(0..1, 3 * GIB).bytes(), 6 * GIB);
        assert_eq!([most_of_share(100, 30), most_of_share(50, 30)], [60, 50]);
    }

    #[test]
    fn models_of_a_rank_divide_its_share_and_give_it_back() {
        let share = Arc::new(HostShare::new(80 * GIB, 2, 4));
        let first = share.take(0..2, 4 * GIB);
        let second = share.take(1..3, 4 * GIB);
        assert_eq!([first.bytes(), second.bytes()], [8 * GIB, 2 * GIB]);
        assert_eq!(
            [share.left(0..1), share.left(1..2), share.left(2..3), share.left(3..4)],
            [2, 0, 8, 10].map(|n| n * GIB)
        );
        assert_eq!(share.take(0..4, GIB).bytes(), 0);
        drop(first);
        assert_eq!([share.left(0..1), share.left(1..2)], [10, 8].map(|n| n * GIB));
        drop(second);
        assert_eq!(share.left(0..4), 10 * GIB);
        assert_eq!(share.left(0..5), 0, "there is no such rank");
    }
}
