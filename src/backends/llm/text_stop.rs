//! Finds stop words in the text of a sequence.
//!
//! The engine finds a stop word by its tokens, but a model may spell the same text by other tokens. So the text of a sequence is
//! searched, too. Tokens are withheld while their text may still be part of a stop word.

use std::collections::VecDeque;
use std::sync::Arc;

use engine::{SampledToken, TokenId};
use generation::{StopSearch, Tokens};
use text::Tokenizer;

/// Ends one sequence of tokens where its text completes a stop word. For requests whose outputs are token ids; where they are
/// texts, [`generation::SequenceText`] does this.
pub(crate) struct TextStop {
    tokenizer: Arc<Tokenizer>,
    /// The token before the output, because a token may have another text at the start of a text.
    before: TokenId,
    search: StopSearch,
    /// Tokens that are withheld, with the length of the text up to the end of each; `None` while a character
    /// that it begins is incomplete.
    withheld: VecDeque<(SampledToken, Option<usize>)>,
    /// Length of the text of released tokens.
    released_len: usize,
    /// The text after that which is not part of a stop word.
    free: String,
}

/// Removes the spellings of stop words with white space before a word that is a stop word itself: the white space belongs to the
/// output. `before` is the last token of the prompt.
pub(crate) fn keep_space(tokenizer: &Arc<Tokenizer>, stop_words: &mut Vec<Vec<TokenId>>, before: TokenId) {
    let texts: Vec<String> = stop_words.iter().map(|word| decode(tokenizer, before, word, false)).collect();
    let is_spaced = |text: &String| {
        let word = text.trim_start();
        word.len() < text.len() && is_searchable(word) && texts.iter().any(|other| other == word)
    };
    let mut spaced = texts.iter().map(is_spaced);
    stop_words.retain(|_| !spaced.next().expect("each word has a text"));
}

/// The texts of stop words that can be searched for. `before` is the last token of the prompt.
pub(crate) fn stop_texts(tokenizer: &Arc<Tokenizer>, stop_words: &[Vec<TokenId>], before: TokenId) -> Vec<String> {
    sorted(stop_words.iter().map(|word| decode(tokenizer, before, word, false)).filter(|text| is_searchable(text)))
}

/// Removes the stop words that a search of the text finds, and returns their texts. The others, which are special tokens or parts of
/// characters, stay: they can be found by their ids only. `before` is the last token of the prompt.
pub(crate) fn take_stop_texts(
    tokenizer: &Arc<Tokenizer>,
    skip_special_tokens: bool,
    stop_words: &mut Vec<Vec<TokenId>>,
    before: TokenId,
) -> Vec<String> {
    let mut texts = Vec::new();
    stop_words.retain(|word| {
        let text = decode(tokenizer, before, word, false);
        let is_whole = !skip_special_tokens || decode(tokenizer, before, word, true) == text;
        let is_taken = is_searchable(&text) && is_whole;
        if is_searchable(&text) {
            texts.push(text);
        }
        !is_taken
    });
    sorted(texts.into_iter())
}

/// Whether the text of a stop word can be searched for.
fn is_searchable(text: &str) -> bool {
    !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER)
}

/// Each text once.
fn sorted(texts: impl Iterator<Item = String>) -> Vec<String> {
    let mut texts: Vec<String> = texts.collect();
    texts.sort_unstable();
    texts.dedup();
    texts
}

impl TextStop {
    /// A search for `texts` after the token `before`; `None` without texts.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, texts: &[String], before: TokenId) -> Option<Self> {
        let search = StopSearch::new(tokenizer, false, texts).after(before);
        search.has_texts().then(|| Self {
            tokenizer: Arc::clone(tokenizer),
            before,
            search,
            withheld: VecDeque::new(),
            released_len: 0,
            free: String::new(),
        })
    }

    /// Adds the next tokens, and appends released tokens to `released`. `ends` says that no more tokens follow.
    ///
    /// Returns true when a stop word was found. Do not push again then.
    pub(crate) fn push(
        &mut self,
        tokens: impl IntoIterator<Item = SampledToken>,
        ends: bool,
        released: &mut Tokens,
    ) -> bool {
        for token in tokens {
            let (id, text_len) = (token.token, self.search.text_len());
            self.withheld.push_back((token, None));
            let is_found = self.search.push(id, &mut self.free).is_some();
            if self.search.text_len() > text_len && self.release(is_found, released) {
                return true;
            }
        }
        if ends {
            let is_found = self.search.finish(&mut self.free).is_some();
            if self.release(is_found, released) {
                return true;
            }
            released.extend(self.withheld.drain(..).map(|(token, _)| token));
        }
        false
    }

    /// Releases the tokens whose text is free. Returns `is_found`.
    fn release(&mut self, is_found: bool, released: &mut Tokens) -> bool {
        let text_len = self.search.text_len();
        for (_, end) in self.withheld.iter_mut().filter(|(_, end)| end.is_none()) {
            *end = Some(text_len);
        }
        let free_len = self.released_len + self.free.len();
        while let Some((token, end)) = self.withheld.pop_front_if(|(_, end)| end.is_some_and(|end| end <= free_len)) {
            let end = end.expect("the filter keeps those with an end");
            self.free.drain(..end - self.released_len);
            self.released_len = end;
            released.push(token);
        }
        if is_found {
            released.extend(spell(&self.tokenizer, self.before, &self.free));
        }
        is_found
    }
}

/// The text of `tokens` after the token `before`.
fn decode(tokenizer: &Arc<Tokenizer>, before: TokenId, tokens: &[TokenId], skip_special_tokens: bool) -> String {
    let mut search = StopSearch::new(tokenizer, skip_special_tokens, &[]).after(before);
    let mut text = String::new();
    tokens.iter().for_each(|&token| _ = search.push(token, &mut text));
    search.finish(&mut text);
    text
}

/// Tokens for the part of a token's text before a stop word. They have no log-probabilities, because they were not sampled. Empty when the
/// tokenizer cannot spell `text` after other text.
fn spell(tokenizer: &Arc<Tokenizer>, before: TokenId, text: &str) -> Vec<SampledToken> {
    let encode = |text: &str| -> Vec<TokenId> {
        tokenizer.encode(text, false).unwrap_or_default().into_iter().map(TokenId).collect()
    };
    let line_end = encode("\n");
    let after_line_end = encode(&format!("\n{text}"));
    let inside = after_line_end.strip_prefix(line_end.as_slice()).unwrap_or_default().to_vec();
    let spellings = [encode(text), inside];
    let right =
        spellings.into_iter().find(|tokens| decode(tokenizer, before, tokens, false) == text).unwrap_or_default();
    right
        .into_iter()
        .map(|token| SampledToken { row: engine::RowId(0), token, logprob: None, top: Vec::new() })
        .collect()
}

#[cfg(test)]
mod tests {
    use engine::RowId;

    use super::*;

    /// Token ids by their text; every string is a token of its own.
    const VOCABULARY: [&str; 12] = ["x", "a", "b", "c", "ab", "bc", "abc", " ", ".", "\n", ".\n", "\nc"];

    fn tokenizer() -> Arc<Tokenizer> {
        let spelled = |token: &str| token.replace(' ', "Ġ").replace('\n', "Ċ");
        let vocab: serde_json::Map<String, serde_json::Value> =
            VOCABULARY.iter().enumerate().map(|(id, token)| (spelled(token), id.into())).collect();
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let json = serde_json::json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        Arc::new(Tokenizer::from_dir(dir.path()).unwrap())
    }

    fn ids(tokens: &[&str]) -> Vec<TokenId> {
        let id = |token: &&str| VOCABULARY.iter().position(|known| known == token).unwrap();
        tokens.iter().map(|token| TokenId(id(token) as u32)).collect()
    }

    /// The text released after each token, and whether a stop word was found.
    fn released(stop_words: &[&[&str]], tokens: &[&str]) -> (Vec<String>, bool) {
        let (tokenizer, before) = (tokenizer(), ids(&["x"])[0]);
        let words: Vec<_> = stop_words.iter().map(|word| ids(word)).collect();
        let texts = stop_texts(&tokenizer, &words, before);
        let mut stop = TextStop::new(&tokenizer, &texts, before).unwrap();
        let mut texts = Vec::new();
        for (index, token) in ids(tokens).into_iter().enumerate() {
            let mut released = Tokens::new();
            let sampled = SampledToken { row: RowId(0), token, logprob: None, top: Vec::new() };
            let found = stop.push([sampled], index + 1 == tokens.len(), &mut released);
            let released: Vec<TokenId> = released.iter().map(|token| token.token).collect();
            texts.push(decode(&tokenizer, before, &released, false));
            if found {
                return (texts, true);
            }
        }
        (texts, false)
    }

    #[test]
    fn a_stop_word_is_found_in_whatever_tokens_spell_it() {
        for tokens in [&["x", "a", "b", "c"][..], &["x", "ab", "c"], &["x", "a", "bc"], &["x", "abc"]] {
            let (texts, found) = released(&[&["ab", "c"]], tokens);
            assert!(found, "{tokens:?}");
            assert_eq!(texts.concat(), "x", "{tokens:?}");
        }
    }

    #[test]
    fn tokens_wait_while_they_may_be_part_of_a_stop_word_and_no_longer() {
        let (texts, found) = released(&[&["a", "b", "c"]], &["x", "a", "b", "a", "x", "ab"]);
        assert!(!found);
        assert_eq!(texts, ["x", "", "", "ab", "ax", "ab"]);
    }

    #[test]
    fn a_token_that_a_stop_word_begins_in_keeps_the_text_before_it() {
        let (texts, found) = released(&[&["\n"]], &["x", ".\n"]);
        assert!(found);
        assert_eq!(texts, ["x", "."]);
        let (texts, found) = released(&[&["\n", "c"]], &["x", ".\n", "b", ".\n", "c"]);
        assert!(found);
        assert_eq!(texts.concat(), "x.\nb.");
    }

    #[test]
    fn a_stop_word_without_text_is_left_to_the_engine() {
        assert!(stop_texts(&tokenizer(), &[vec![TokenId(999)]], TokenId(0)).is_empty());
        assert!(TextStop::new(&tokenizer(), &[], TokenId(0)).is_none());
    }
}
