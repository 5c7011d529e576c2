//! Detokenizes a request's sequences, for responses of a text ensemble.

use generation::TextDecoder;
use serving::{CallCounter, Elements, Name, OutputDelta, Tensor, TextOutputs, Timestamp};
use smallvec::SmallVec;
use text::Detokenizer;

/// The detokenizers of a request's sequences.
pub(crate) struct Texts {
    decoder: TextDecoder,
    is_nested: bool,
    has_lengths: bool,
    calls: CallCounter,
    /// By sequence. Created with its first tokens.
    detokenizers: SmallVec<[Option<Detokenizer>; 1]>,
    /// New text of the last call, row after row.
    pieces: String,
}

impl Texts {
    /// Detokenizers for `num_sequences` sequences.
    pub(crate) fn new(outputs: TextOutputs, num_sequences: usize) -> Self {
        let TextOutputs { decoder, is_nested, has_lengths, calls, .. } = outputs;
        let detokenizers = std::iter::repeat_with(|| None).take(num_sequences).collect();
        Self { decoder, is_nested, has_lengths, calls, detokenizers, pieces: String::new() }
    }

    /// Sets the output at index `output` to the text of one token of a sequence. Returns the time after that.
    pub(crate) fn push_one(
        &mut self,
        sequence: usize,
        token: u32,
        output: usize,
        delta: &mut OutputDelta,
    ) -> Timestamp {
        let started = Timestamp::now();
        let Self { detokenizers, decoder, pieces, .. } = self;
        pieces.clear();
        detokenizers[sequence].get_or_insert_with(|| decoder.start()).push_into(token, pieces);
        delta.set(output, Elements::text(pieces));
        let ended = Timestamp::now();
        self.calls.count(ended.ns_since(started));
        ended
    }

    /// The text of new tokens of some sequences. A row has the index of its sequence, its tokens, its padding up to the longest row, and
    /// whether the sequence has ended.
    pub(crate) fn push_rows(
        &mut self,
        name: &Name,
        rows: impl Iterator<Item = (usize, impl Iterator<Item = u32>, impl Iterator<Item = u32>, bool)>,
    ) -> Tensor {
        let started = Timestamp::now();
        let Self { detokenizers, decoder, pieces, has_lengths, .. } = self;
        pieces.clear();
        let mut ends = SmallVec::<[usize; 4]>::new();
        for (sequence, tokens, padding, has_ended) in rows {
            let text = detokenizers[sequence].get_or_insert_with(|| decoder.start());
            tokens.for_each(|token| text.push_into(token, pieces));
            if !*has_lengths {
                padding.for_each(|token| text.push_into(token, pieces));
            }
            if has_ended {
                text.finish_into(pieces);
            }
            ends.push(pieces.len());
        }
        let begins = std::iter::once(0).chain(ends.iter().copied());
        let texts: SmallVec<[&str; 4]> = begins.zip(&ends).map(|(begin, &end)| &pieces[begin..end]).collect();
        let (nested, list) = ([1, texts.len() as i64], [texts.len() as i64]);
        let tensor = Tensor::from_byte_strings(name.clone(), if self.is_nested { &nested[..] } else { &list }, &texts);
        self.calls.count(Timestamp::now().ns_since(started));
        tensor
    }

    /// Adds the counts to the detokenizer's statistics.
    pub(crate) fn flush(&mut self) {
        self.calls.flush();
    }
}
