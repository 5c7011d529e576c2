/// Cuts a stream of text before the first stop string that it completes.
///
/// Text that may still become a stop string is held back, so no part of a stop string is ever emitted. Of two stop strings that the
/// same byte completes, the longer one is reported. A byte costs one step per stop string, amortized.
///
/// ```
/// let mut stop = text::StopText::new(["\n\nUser:".to_owned()]);
/// let mut out = String::new();
/// assert_eq!(stop.push("Hello.\n", &mut out), None);
/// assert_eq!(out, "Hello.");
/// assert_eq!(stop.push("\nUser: hi", &mut out), Some(0));
/// assert_eq!(out, "Hello.");
/// ```
pub struct StopText {
    matchers: Vec<Matcher>,
    /// The longest end of the text that is the start of a stop string.
    held: String,
}

impl StopText {
    /// Empty stop strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let matchers = stops.into_iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        Self {
            matchers: matchers.map(|(index, stop)| Matcher::new(index, stop.into_bytes())).collect(),
            held: String::new(),
        }
    }

    /// Appends to `out` the text that cannot belong to a stop string any more.
    ///
    /// Returns the index of the stop string that `piece` completes. The text from its start on is dropped; do not push again.
    pub fn push(&mut self, piece: &str, out: &mut String) -> Option<usize> {
        if self.matchers.is_empty() {
            out.push_str(piece);
            return None;
        }
        for (index, &byte) in piece.as_bytes().iter().enumerate() {
            self.matchers.iter_mut().for_each(|matcher| matcher.step(byte));
            let complete = self.matchers.iter().filter(|matcher| matcher.is_complete());
            if let Some(found) = complete.max_by_key(|matcher| matcher.pattern.len()) {
                let (stop, stop_bytes) = (found.index, found.pattern.len());
                self.release(&piece[..=index], stop_bytes, out);
                self.held.clear();
                return Some(stop);
            }
        }
        let hold_bytes = self.matchers.iter().map(|matcher| matcher.matched).max().unwrap_or(0);
        self.release(piece, hold_bytes, out);
        None
    }

    /// Ends a text without a stop string: appends the held text. Call it once.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Appends the held text and `piece` to `out`, except for the last `hold_bytes`, which are held.
    fn release(&mut self, piece: &str, hold_bytes: usize, out: &mut String) {
        if hold_bytes <= piece.len() {
            out.push_str(&self.held);
            let (free, held) = piece.split_at(piece.len() - hold_bytes);
            out.push_str(free);
            self.held.clear();
            self.held.push_str(held);
        } else {
            self.held.push_str(piece);
            let free_bytes = self.held.len() - hold_bytes;
            out.extend(self.held.drain(..free_bytes));
        }
    }
}

/// The search of Knuth, Morris and Pratt (1977), one byte at a time: how much of a pattern the text ends with.
struct Matcher {
    index: usize,
    pattern: Vec<u8>,
    /// `fallback[n]`: the longest proper prefix of the pattern that its first `n + 1` bytes end with.
    fallback: Vec<usize>,
    matched: usize,
}

impl Matcher {
    fn new(index: usize, pattern: Vec<u8>) -> Self {
        let mut fallback = vec![0; pattern.len()];
        let mut matched = 0;
        for end in 1..pattern.len() {
            matched = extend(&pattern, &fallback, matched, pattern[end]);
            fallback[end] = matched;
        }
        Self { index, pattern, fallback, matched: 0 }
    }

    fn step(&mut self, byte: u8) {
        self.matched = extend(&self.pattern, &self.fallback, self.matched, byte);
    }

    fn is_complete(&self) -> bool {
        self.matched == self.pattern.len()
    }
}

fn extend(pattern: &[u8], fallback: &[usize], mut matched: usize, byte: u8) -> usize {
    while matched == pattern.len() || pattern[matched] != byte {
        if matched == 0 {
            return 0;
        }
        matched = fallback[matched - 1];
    }
    matched + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[String], pieces: &[String]) -> (String, Option<usize>) {
        let mut stop = StopText::new(stops.iter().cloned());
        let mut out = String::new();
        for piece in pieces {
            if let Some(index) = stop.push(piece, &mut out) {
                return (out, Some(index));
            }
        }
        stop.finish(&mut out);
        (out, None)
    }

    /// The definition: the stop string that ends first, the longest of those.
    fn cut(stops: &[String], text: &str) -> (String, Option<usize>) {
        let found = stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let found = found.filter_map(|(index, stop)| {
            let start = text.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        match found.min_by_key(|&(end, start, index)| (end, start, std::cmp::Reverse(index))) {
            Some((_, start, index)) => (text[..start].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    #[test]
    fn a_partial_match_is_held_and_emitted_when_it_fails() {
        let mut stop = StopText::new(["END".to_owned()]);
        let mut out = String::new();
        assert_eq!(stop.push("the E", &mut out), None);
        assert_eq!(out, "the ");
        assert_eq!(stop.push("N", &mut out), None);
        assert_eq!(out, "the ");
        assert_eq!(stop.push("EN", &mut out), None);
        assert_eq!(out, "the EN");
        stop.finish(&mut out);
        assert_eq!(out, "the ENEN");
    }

    proptest! {
        #[test]
        fn a_text_in_any_pieces_ends_before_the_first_stop_string(
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
            pieces in prop::collection::vec("[abcé]{0,5}", 0..12),
        ) {
            let (text, index) = run(&stops, &pieces);
            let (expected, expected_index) = cut(&stops, &pieces.concat());
            prop_assert_eq!(&text, &expected);
            prop_assert_eq!(index.map(|i| &stops[i]), expected_index.map(|i| &stops[i]));
        }

        #[test]
        fn the_start_of_a_stop_string_is_never_emitted_early(
            stop in "[ab]{2,5}",
            pieces in prop::collection::vec("[ab]{1,3}", 1..8),
        ) {
            let mut cutter = StopText::new([stop.clone()]);
            let (mut out, mut seen) = (String::new(), String::new());
            for piece in &pieces {
                seen.push_str(piece);
                if cutter.push(piece, &mut out).is_some() {
                    break;
                }
                let held = (0..stop.len()).rev().find(|&n| seen.ends_with(&stop[..n])).unwrap_or(0);
                prop_assert_eq!(&out, &seen[..seen.len() - held]);
            }
        }
    }
}
