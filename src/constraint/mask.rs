/// A set of tokens of a vocabulary: bit `id % 32` of word `id / 32` says that token `id` is in the set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u32>,
    vocab_size: usize,
}

impl Mask {
    /// The words, `vocab_size.div_ceil(32)` of them. Bits beyond the vocabulary are zero.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// How many tokens the vocabulary has.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Whether a token is in the set; false beyond the vocabulary.
    pub fn allows(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// How many tokens are in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The tokens in the set, ascending.
    pub fn allowed(&self) -> impl Iterator<Item = u32> {
        self.words
            .iter()
            .zip(0u32..)
            .flat_map(|(&word, index)| (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 32 + bit))
    }

    /// Makes this the set `words` over `vocab_size` tokens; missing words are zero. Keeps the allocation.
    pub(crate) fn assign(&mut self, words: &[u32], vocab_size: usize) {
        let len = vocab_size.div_ceil(32);
        self.vocab_size = vocab_size;
        self.words.clear();
        self.words.extend_from_slice(&words[..words.len().min(len)]);
        self.words.resize(len, 0);
        if let (Some(last), used @ 1..) = (self.words.last_mut(), vocab_size % 32) {
            *last &= (1 << used) - 1;
        }
    }

    pub(crate) fn allow(&mut self, token: u32) {
        if (token as usize) < self.vocab_size {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    pub(crate) fn forbid(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_beyond_the_vocabulary_are_zero() {
        let mut mask = Mask::default();
        mask.assign(&[u32::MAX, u32::MAX], 35);
        assert_eq!((mask.words(), mask.count()), ([u32::MAX, 0b111].as_slice(), 35));
        mask.assign(&[1], 70);
        assert_eq!(mask.words(), [1, 0, 0]);
        mask.allow(69);
        mask.allow(70);
        mask.forbid(0);
        mask.forbid(1000);
        assert_eq!(mask.allowed().collect::<Vec<_>>(), [69]);
        assert!(mask.allows(69) && !mask.allows(70) && !mask.allows(1000));
    }
}
