//! The text of one sequence, with the search for stop texts.

use std::collections::VecDeque;
use std::sync::Arc;

use engine::{SampledToken, TokenId};
use text::Tokenizer;

use crate::{StopSearch, StopTexts, TextOptions, Tokens};

/// Turns the tokens of one sequence into text, and ends it where a stop text is complete.
///
/// Text that may still become a stop text is withheld, with the tokens that begin in it. The pieces of text joined are the
/// text of the sequence, and each token is released once.
pub struct SequenceText {
    search: StopSearch,
    stop: Arc<StopTexts>,
    /// Tokens that are withheld, each with the position of its first byte in the text.
    withheld: VecDeque<(SampledToken, usize)>,
    /// Bytes of text that were released.
    released_len: usize,
    /// Text of the prompt that the next piece begins with.
    prompt_text: String,
}

impl SequenceText {
    /// The text of a sequence before its first token.
    pub fn new(tokenizer: &Arc<Tokenizer>, options: TextOptions, stop: &Arc<StopTexts>) -> Self {
        Self {
            search: StopSearch::new(tokenizer, options.skip_special_tokens, &stop.texts),
            stop: Arc::clone(stop),
            withheld: VecDeque::new(),
            released_len: 0,
            prompt_text: String::new(),
        }
    }

    /// Lets the text begin with that of the prompt, which is not searched.
    pub fn with_prompt(mut self, prompt: &[TokenId]) -> Self {
        self.search.decode_prompt(prompt, &mut self.prompt_text);
        self
    }

    /// Whether there are stop texts.
    pub fn has_stop_texts(&self) -> bool {
        self.search.has_texts()
    }

    /// Adds tokens. Appends the text that cannot belong to a stop text any more to `text`, and the tokens that begin in
    /// released text to `released`. `ends` says that no more tokens come.
    ///
    /// Returns the index of the stop text that ends the sequence here; do not push again then.
    pub fn push(
        &mut self,
        tokens: impl IntoIterator<Item = SampledToken>,
        ends: bool,
        text: &mut String,
        released: &mut Tokens,
    ) -> Option<usize> {
        text.push_str(&std::mem::take(&mut self.prompt_text));
        for token in tokens {
            if !self.has_stop_texts() {
                self.search.push(token.token, text);
                released.push(token);
                continue;
            }
            let (before, begin, id) = (text.len(), self.search.text_len(), token.token);
            self.withheld.push_back((token, begin));
            let found = self.search.push(id, text);
            self.release(text.len() - before, found, text, released);
            if found.is_some() {
                return found;
            }
        }
        if !ends {
            return None;
        }
        let before = text.len();
        let found = self.search.finish(text);
        self.release(text.len() - before, found, text, released);
        if found.is_none() {
            released.extend(self.withheld.drain(..).map(|(token, _)| token));
        }
        found
    }

    /// Releases tokens after `len` more bytes of text were released.
    fn release(&mut self, len: usize, found: Option<usize>, text: &mut String, released: &mut Tokens) {
        self.released_len += len;
        let is_free = self.released_len == self.search.text_len() && found.is_none();
        let includes_stop = found.is_some() && self.stop.is_included;
        while let Some((token, _)) =
            self.withheld.pop_front_if(|(_, begin)| is_free || includes_stop || *begin < self.released_len)
        {
            released.push(token);
        }
        if let Some(found) = found.filter(|_| self.stop.is_included) {
            text.push_str(&self.stop.texts[found]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{RowId, TokenId};

    /// Token ids by their text.
    const VOCABULARY: [&str; 8] = ["x", "a", "b", "ab", " ", "é", "bc", "c"];

    fn tokenizer() -> Arc<Tokenizer> {
        // Byte-level BPE spells a space and the two bytes of `é` by other characters.
        let spelled = |token: &str| token.replace(' ', "Ġ").replace('é', "Ã©");
        let vocab: serde_json::Map<String, serde_json::Value> =
            VOCABULARY.iter().enumerate().map(|(id, token)| (spelled(token), id.into())).collect();
        let mut vocab = vocab;
        vocab.insert("Ã".to_owned(), 8.into());
        vocab.insert("©".to_owned(), 9.into());
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let json = serde_json::json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        Arc::new(Tokenizer::from_dir(dir.path()).unwrap())
    }

    /// After each token: the released text and the released token ids; and the stop text found.
    fn run(stop: StopTexts, tokens: &[u32]) -> (Vec<(String, Vec<u32>)>, Option<usize>) {
        let mut sequence = SequenceText::new(&tokenizer(), TextOptions { skip_special_tokens: true }, &Arc::new(stop));
        let mut steps = Vec::new();
        for (at, &token) in tokens.iter().enumerate() {
            let (mut text, mut released) = (String::new(), Tokens::new());
            let sampled = SampledToken { row: RowId(0), token: TokenId(token), logprob: None, top: Vec::new() };
            let found = sequence.push([sampled], at + 1 == tokens.len(), &mut text, &mut released);
            steps.push((text, released.iter().map(|token| token.token.0).collect()));
            if found.is_some() {
                return (steps, found);
            }
        }
        (steps, None)
    }

    fn stop(texts: &[&str]) -> StopTexts {
        StopTexts { texts: texts.iter().map(|text| (*text).to_owned()).collect(), is_included: false }
    }

    fn step(text: &str, tokens: &[u32]) -> (String, Vec<u32>) {
        (text.to_owned(), tokens.to_vec())
    }

    #[test]
    fn without_stop_texts_every_token_is_released_at_once() {
        let (steps, found) = run(StopTexts::default(), &[0, 8, 9, 3]);
        assert_eq!((steps, found), (vec![step("x", &[0]), step("", &[8]), step("é", &[9]), step("ab", &[3])], None));
    }

    #[test]
    fn a_stop_text_keeps_the_text_before_it_and_drops_its_tokens() {
        let (steps, found) = run(stop(&["zz", "bc"]), &[0, 4, 3, 7]);
        assert_eq!(steps, [step("x", &[0]), step(" ", &[4]), step("a", &[3]), step("", &[])]);
        assert_eq!(found, Some(1));
        let (steps, found) = run(stop(&["bc"]), &[0, 1, 6]);
        assert_eq!((steps, found), (vec![step("x", &[0]), step("a", &[1]), step("", &[])], Some(0)));
    }

    #[test]
    fn held_text_is_released_when_it_is_no_stop_text_or_when_the_sequence_ends() {
        let (steps, found) = run(stop(&["abc"]), &[1, 2, 0, 3]);
        assert_eq!(steps, [step("", &[]), step("", &[]), step("abx", &[1, 2, 0]), step("ab", &[3])]);
        assert_eq!(found, None);
    }

    #[test]
    fn a_text_may_begin_with_its_prompt_which_is_not_searched() {
        let stop = Arc::new(stop(&["ab"]));
        let options = TextOptions { skip_special_tokens: true };
        let mut sequence = SequenceText::new(&tokenizer(), options, &stop).with_prompt(&[TokenId(3), TokenId(8)]);
        let mut push = |token: u32| {
            let (mut text, mut released) = (String::new(), Tokens::new());
            let sampled = SampledToken { row: RowId(0), token: TokenId(token), logprob: None, top: Vec::new() };
            let found = sequence.push([sampled], false, &mut text, &mut released);
            (text, released.len(), found)
        };
        assert_eq!(push(9), ("abé".to_owned(), 1, None), "the character that the prompt begins is completed");
        assert_eq!(push(0), ("x".to_owned(), 1, None));
        assert_eq!(push(3), (String::new(), 0, Some(0)));
    }

    #[test]
    fn an_included_stop_text_ends_the_text() {
        let rule = StopTexts { is_included: true, ..stop(&["bc"]) };
        let (steps, found) = run(rule, &[0, 3, 7]);
        assert_eq!((steps, found), (vec![step("x", &[0]), step("a", &[3]), step("bc", &[7])], Some(0)));
    }
}
