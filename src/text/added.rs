use crate::files::AddedToken;
use crate::trie::Trie;

/// Added tokens: they are matched in a text before the tokenizer's model encodes the rest.
#[derive(Debug, Default)]
pub(crate) struct AddedTokens {
    tokens: Vec<(u32, AddedToken)>,
    trie: Trie,
}

/// A part of a text: one added token, or the text between two of them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    Text(&'a str),
    Token(u32),
}

impl AddedTokens {
    pub(crate) fn new(tokens: Vec<(u32, AddedToken)>) -> Self {
        let trie = Trie::new(tokens.iter().enumerate().map(|(index, (_, token))| (&token.content[..], index as u32)));
        Self { tokens, trie }
    }

    pub(crate) fn tokens(&self) -> &[(u32, AddedToken)] {
        &self.tokens
    }

    pub(crate) fn id(&self, content: &str) -> Option<u32> {
        self.tokens.iter().find(|(_, token)| token.content == content).map(|(id, _)| *id)
    }

    pub(crate) fn content(&self, id: u32) -> Option<&str> {
        self.tokens.iter().find(|(known, _)| *known == id).map(|(_, token)| &token.content[..])
    }

    /// Splits a text at its added tokens, from left to right. Of several tokens that start at one place the longest is taken.
    pub(crate) fn split<'a>(&self, text: &'a str) -> Vec<Segment<'a>> {
        let (mut segments, mut start, mut at) = (Vec::new(), 0, 0);
        while let Some(c) = text[at..].chars().next() {
            let found = self.trie.longest(&text.as_bytes()[at..]);
            let found = found.map(|(len, index)| (at + len, &self.tokens[index as usize]));
            let Some((end, (id, token))) = found.filter(|(end, found)| found.1.may_match(text, at, *end)) else {
                at += c.len_utf8();
                continue;
            };
            let before = &text[start..at];
            let before = if token.lstrip { before.trim_end() } else { before };
            if !before.is_empty() {
                segments.push(Segment::Text(before));
            }
            segments.push(Segment::Token(*id));
            at = if token.rstrip { text.len() - text[end..].trim_start().len() } else { end };
            start = at;
        }
        if start < text.len() {
            segments.push(Segment::Text(&text[start..]));
        }
        segments
    }
}

impl AddedToken {
    /// Whether a match at `start..end` counts: a `single_word` token must not be part of a longer word.
    fn may_match(&self, text: &str, start: usize, end: usize) -> bool {
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !self.single_word || !is_word(text[..start].chars().next_back()) && !is_word(text[end..].chars().next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_split_at_the_longest_tokens() {
        let plain = |content: &str| AddedToken::plain(content.to_owned(), true);
        let tokens = AddedTokens::new(vec![
            (7, plain("<a>")),
            (8, plain("<a><b>")),
            (9, AddedToken { lstrip: true, rstrip: true, ..plain("<m>") }),
            (10, AddedToken { single_word: true, ..plain("é") }),
        ]);
        let text = "x<a><a><b> y  <m>\n z éé é";
        let expected = [
            Segment::Text("x"),
            Segment::Token(7),
            Segment::Token(8),
            Segment::Text(" y"),
            Segment::Token(9),
            Segment::Text("z éé "),
            Segment::Token(10),
        ];
        assert_eq!(tokens.split(text), expected);
        assert_eq!(tokens.split(""), []);
    }
}
