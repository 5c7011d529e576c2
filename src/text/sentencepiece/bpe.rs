use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::pieces::{Found, Pieces};

/// A part of the text that is one piece so far; a node of a linked list.
struct Symbol {
    start: usize,
    len: usize, // 0 once it was merged into the one before it
    prev: Option<usize>,
    next: Option<usize>,
    is_whole: bool, // a user-defined piece, never merged
}

/// Two adjacent symbols whose concatenation is a piece.
struct Pair {
    left: usize,
    right: usize,
    score: f32,
    len: usize,
}

impl Ord for Pair {
    /// Higher scores first; of equal scores the leftmost pair.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

/// State of the merges of one text.
struct Merges<'a> {
    text: &'a str,
    pieces: &'a Pieces,
    symbols: Vec<Symbol>,
    pairs: BinaryHeap<Pair>,
    /// The two parts of each unused piece.
    origin: HashMap<&'a str, (&'a str, &'a str)>,
}

/// The pieces of a normalized text: the adjacent pair with the best score is merged until no pair is a piece (Sennrich et al. 2016;
/// by score as in Kudo and Richardson 2018).
pub(super) fn encode(text: &str, pieces: &Pieces, found: &mut Vec<Found>) {
    let mut merges = Merges { text, pieces, symbols: Vec::new(), pairs: BinaryHeap::new(), origin: HashMap::new() };
    merges.split();
    for right in 1..merges.symbols.len() {
        merges.push_pair(Some(right - 1), Some(right));
    }
    while let Some(pair) = merges.pairs.pop() {
        merges.merge(&pair);
    }
    for symbol in merges.symbols.iter().filter(|symbol| symbol.len > 0) {
        merges.emit(&text[symbol.start..symbol.start + symbol.len], found);
    }
}

impl<'a> Merges<'a> {
    /// Starts with characters and user-defined pieces.
    fn split(&mut self) {
        let mut start = 0;
        while let Some(c) = self.text[start..].chars().next() {
            let whole = self.pieces.user_defined.longest(&self.text.as_bytes()[start..]);
            let len = whole.map_or(c.len_utf8(), |(len, _)| len);
            let index = self.symbols.len();
            let next = (start + len < self.text.len()).then_some(index + 1);
            self.symbols.push(Symbol { start, len, prev: index.checked_sub(1), next, is_whole: whole.is_some() });
            start += len;
        }
    }

    fn push_pair(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let (a, b) = (&self.symbols[left], &self.symbols[right]);
        if a.is_whole || b.is_whole {
            return;
        }
        let text: &'a str = self.text;
        let joined = &text[a.start..b.start + b.len];
        let Some(&id) = self.pieces.by_text.get(joined) else { return };
        if self.pieces.is_unused(id) {
            self.origin.insert(joined, (&text[a.start..a.start + a.len], &text[b.start..b.start + b.len]));
        }
        self.pairs.push(Pair { left, right, score: self.pieces.scores[id as usize], len: joined.len() });
    }

    /// Merges a pair unless one of its symbols has been merged with another since.
    fn merge(&mut self, pair: &Pair) {
        let (left, right) = (&self.symbols[pair.left], &self.symbols[pair.right]);
        if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
            return;
        }
        let next = right.next;
        self.symbols[pair.left].len = pair.len;
        self.symbols[pair.left].next = next;
        self.symbols[pair.right].len = 0;
        if let Some(next) = next {
            self.symbols[next].prev = Some(pair.left);
        }
        self.push_pair(self.symbols[pair.left].prev, Some(pair.left));
        self.push_pair(Some(pair.left), next);
    }

    /// Adds `text`. An unused piece is split into the pieces that it was merged from; one of a single character is unknown,
    /// as in sentencepiece 0.2.3.
    fn emit(&self, text: &'a str, found: &mut Vec<Found>) {
        let id = self.pieces.by_text.get(text).copied();
        match id.filter(|&id| self.pieces.is_unused(id)).map(|_| self.origin.get(text)) {
            Some(Some((left, right))) => {
                self.emit(left, found);
                self.emit(right, found);
            }
            Some(None) => found.push(Found { len: text.len(), id: None }),
            None => found.push(Found { len: text.len(), id }),
        }
    }
}
