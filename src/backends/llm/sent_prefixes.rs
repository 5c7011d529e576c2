//! Which prompts a replica has been sent, by hashes of their blocks: an estimate of what its prefix cache holds.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use engine::TokenId;

/// A block of a prompt and all before it. Two that are alike by chance only send a request to another replica.
pub(crate) type PrefixHash = u64;

/// The hash of each full block of `prompt`, with those before it; the last token is always left to compute.
pub(crate) fn hashes(prompt: &[TokenId], block_size: usize) -> Vec<PrefixHash> {
    let mut hasher = DefaultHasher::new();
    let blocks = prompt[..prompt.len().saturating_sub(1)].chunks_exact(block_size);
    let hash = |block: &[TokenId]| {
        block.hash(&mut hasher);
        hasher.finish()
    };
    blocks.map(hash).collect()
}

/// The prefixes that were sent last.
#[derive(Debug, Default)]
pub(crate) struct SentPrefixes {
    /// When each was noted last.
    known: HashMap<PrefixHash, u64>,
    /// Notes in their order; outdated ones are of prefixes that were noted again.
    notes: VecDeque<(PrefixHash, u64)>,
    num_notes: u64,
}

impl SentPrefixes {
    /// How many of these are known, from the first on.
    pub(crate) fn num_known(&self, hashes: &[PrefixHash]) -> usize {
        hashes.iter().take_while(|hash| self.known.contains_key(hash)).count()
    }

    /// They were sent; the `max` that were sent last stay known.
    pub(crate) fn note(&mut self, hashes: &[PrefixHash], max: usize) {
        // Later blocks of a prompt are of no use without those before them, so they go first.
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
