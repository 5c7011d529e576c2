//! Which copy in a full cache is evicted first: the rule for snapshots of the device, and for host memory and disk.
//!
//! A copy is as useful as the number of KV blocks that it saves for its memory, times how often it was used. Usefulness ages: it counts
//! from that of the last copy that was evicted before the copy was taken or used (GreedyDual-Size with frequency, Cherkasova 1998). All
//! copies of a kind take the same memory.

/// Usefulness, and when the copy was used last. The least is evicted first.
pub(crate) type Rank = (u64, u64);

/// How useful a copy is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usefulness {
    /// Number of KV blocks that need not be computed where the copy is.
    num_saved: u64,
    /// How often it was taken or used.
    num_uses: u64,
    pub(crate) rank: Rank,
}

impl Usefulness {
    /// That of a copy that is taken now and has no rank yet.
    pub(crate) fn new(num_saved: usize) -> Self {
        Self { num_saved: num_saved as u64, num_uses: 1, rank: (0, 0) }
    }

    /// The same after another use. It has the rank that it had before.
    pub(crate) fn used(self) -> Self {
        Self { num_uses: self.num_uses + 1, ..self }
    }

    /// With the uses of another copy of the same content, if they are more.
    pub(crate) fn or_used_as(self, other: Self) -> Self {
        Self { num_uses: self.num_uses.max(other.num_uses), ..self }
    }
}

/// Ranks the copies of one cache.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ranking {
    /// Number of uses that count; `None` for all.
    max_uses: Option<u64>,
    /// Usefulness of the copy that was the most useful of those that were evicted.
    evicted: u64,
    /// Counts uses.
    clock: u64,
}

impl Ranking {
    /// Counts at most `max_uses` uses of a copy.
    pub(crate) fn with_max_uses(max_uses: u64) -> Self {
        Self { max_uses: Some(max_uses), ..Self::default() }
    }

    /// Ranks a copy that is taken or used now.
    pub(crate) fn rank(&mut self, usefulness: Usefulness) -> Usefulness {
        self.clock += 1;
        let num_uses = self.max_uses.map_or(usefulness.num_uses, |max| usefulness.num_uses.min(max));
        Usefulness { rank: (self.evicted + num_uses * usefulness.num_saved, self.clock), ..usefulness }
    }

    /// A copy was evicted.
    pub(crate) fn evict(&mut self, usefulness: Usefulness) {
        self.evicted = self.evicted.max(usefulness.rank.0);
    }

    /// The last use of the copy that was used last.
    pub(crate) fn last_use(&self) -> u64 {
        self.clock
    }
}
