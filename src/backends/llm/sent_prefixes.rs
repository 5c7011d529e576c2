//! The prompt prefixes that were sent to a replica, as an estimate of its prefix cache.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use engine::TokenId;

/// Hash of a block of a prompt and all blocks before it. A collision only affects the choice of a replica.
pub(crate) type PrefixHash = u64;

/// The hash of each full block of `prompt`, without the last token, which is always computed.
pub(crate) fn hashes(prompt: &[TokenId], block_size: usize) -> Vec<PrefixHash> {
    let mut hasher = DefaultHasher::new();
    let blocks = prompt[..prompt.len().saturating_sub(1)].chunks_exact(block_size);
    let hash = |block: &[TokenId]| {
        block.hash(&mut hasher);
        hasher.finish()
    };
    blocks.map(hash).collect()
}

/// The most recently sent prefixes.
#[derive(Debug, Default)]
pub(crate) struct SentPrefixes {
    /// The number of the last record of each prefix.
    known: HashMap<PrefixHash, u64>,
    /// Records in order. A record is outdated if its prefix was recorded again.
    notes: VecDeque<(PrefixHash, u64)>,
    num_notes: u64,
}

impl SentPrefixes {
    /// Number of leading hashes that are known.
    pub(crate) fn num_known(&self, hashes: &[PrefixHash]) -> usize {
        hashes.iter().take_while(|hash| self.known.contains_key(hash)).count()
    }

    /// Records sent prefixes. The last `max` stay known.
    pub(crate) fn note(&mut self, hashes: &[PrefixHash], max: usize) {
        // Later blocks of a prompt are useless without the earlier ones, so they are evicted first.
        for &hash in hashes.iter().rev() {
            self.num_notes += 1;
            self.known.insert(hash, self.num_notes);
            self.notes.push_back((hash, self.num_notes));
        }
        let Self { known, notes, .. } = self;
        let is_current = |known: &HashMap<_, _>, (hash, at): &(PrefixHash, u64)| known.get(hash) == Some(at);
        while known.len() > max {
            let oldest = notes.pop_front().expect("what is known was noted");
            if is_current(known, &oldest) {
                known.remove(&oldest.0);
            }
        }
        if notes.len() > 2 * max {
            notes.retain(|note| is_current(known, note));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    #[test]
    fn blocks_are_alike_when_all_before_them_are() {
        let long = hashes(&tokens(0..13), 4);
        assert_eq!((long.len(), hashes(&tokens(0..12), 4).len()), (3, 2), "the last token is computed");
        assert_eq!(hashes(&tokens(0..9), 4), long[..2]);
        let mut other = tokens(0..13);
        other[0] = TokenId(99);
        assert!(hashes(&other, 4).iter().all(|hash| !long.contains(hash)));
        assert!(hashes(&[], 4).is_empty());
    }

    #[test]
    fn the_prefixes_that_were_sent_last_stay_known_from_their_start() {
        let [a, b] = [[1, 2, 3], [11, 12, 13]];
        let mut prefixes = SentPrefixes::default();
        prefixes.note(&a, 4);
        prefixes.note(&b, 4);
        assert_eq!((prefixes.num_known(&a), prefixes.num_known(&b)), (1, 3));
        for _ in 0..100 {
            prefixes.note(&a, 4);
        }
        assert_eq!((prefixes.num_known(&a), prefixes.num_known(&b)), (3, 1));
        assert!(prefixes.notes.len() <= 8 && prefixes.known.len() <= 4);
    }
}
