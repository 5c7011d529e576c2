//! Values as Python or Gemma 4 write them, given as JSON as they come.

use crate::escape::{push_escaped, quoted};
use crate::json::is_number;
use crate::json::{MAX_DEPTH, Step};
use crate::marker::MarkerScan;

/// The longest number, name or key without quotes, in bytes.
const MAX_WORD: usize = 256;

#[derive(Clone, Copy, PartialEq)]
enum At {
    Value,
    /// A key, or the end of the container.
    Key,
    Colon,
    After,
    Word {
        key: bool,
    },
    /// A string between this character and itself, with escapes.
    Text {
        quote: char,
        key: bool,
    },
    /// The marker that opens a string.
    Open {
        key: bool,
    },
    /// A string up to the marker, without escapes.
    Marked {
        key: bool,
    },
    End,
}

/// One value.
pub(crate) struct Literal {
    at: At,
    /// For each open container, its closing bracket and whether it has an item.
    stack: Vec<(char, bool)>,
    word: String,
    escape: Option<String>,
    high: Option<u32>,
    /// The marker around strings. Keys and other words need no quotes then.
    quote: Option<String>,
    scan: MarkerScan,
}

impl Literal {
    pub(crate) fn new(quote: Option<String>) -> Self {
        let (stack, word) = (Vec::new(), String::new());
        Self { at: At::Value, stack, word, escape: None, high: None, quote, scan: MarkerScan::default() }
    }

    /// Whether the characters so far were given, in some form.
    pub(crate) fn is_certain(&self) -> bool {
        !matches!(self.at, At::Word { .. } | At::Open { .. })
    }

    pub(crate) fn push(&mut self, c: char, out: &mut String) -> Step {
        match self.at {
            At::Text { quote, key } => self.text(c, quote, key, out),
            At::Marked { key } => self.marked(c, key, out),
            At::Open { key } => self.open(c, key, out),
            At::Word { key } => self.word(c, key, out),
            At::End => Step::Before,
            _ if c.is_whitespace() => Step::More,
            At::Value | At::Key => self.item(c, out),
            At::Colon if c == ':' => {
                out.push(':');
                self.at = At::Value;
                Step::More
            }
            At::Colon => Step::Broken,
            At::After => match (c, self.stack.last()) {
                (',', Some(&(close, _))) => {
                    self.at = if close == '}' { At::Key } else { At::Value };
                    Step::More
                }
                (_, Some(&(close, _))) if close == c => self.pop(out),
                _ => Step::Broken,
            },
        }
    }

    /// Gives what is missing to make JSON of the value.
    pub(crate) fn close(&mut self, out: &mut String) {
        self.lone(out);
        match self.at {
            At::Marked { key } | At::Text { key, .. } => {
                self.scan.take().chars().for_each(|c| push_escaped(c, out));
                out.push_str(if key { "\":null" } else { "\"" });
            }
            At::Colon => out.push_str(":null"),
            At::Value | At::Word { key: false } | At::Open { key: false }
                if !matches!(self.stack.last(), Some((']' | ')', _))) =>
            {
                out.push_str("null");
            }
            _ => {}
        }
        while let Some((close, _)) = self.stack.pop() {
            out.push(if close == '}' { '}' } else { ']' });
        }
        self.at = At::End;
    }

    fn ended(&mut self) -> Step {
        self.at = if self.stack.is_empty() { At::End } else { At::After };
        if self.stack.is_empty() { Step::Done } else { Step::More }
    }

    fn pop(&mut self, out: &mut String) -> Step {
        let close = self.stack.pop().map(|(close, _)| close);
        out.push(if close == Some('}') { '}' } else { ']' });
        self.ended()
    }

    /// The comma before an item of a list or a key, if it is not the first.
    fn comma(&mut self, key: bool, out: &mut String) {
        if let Some((close, has_item)) = self.stack.last_mut()
            && (key || *close != '}')
            && std::mem::replace(has_item, true)
        {
            out.push_str(", ");
        }
    }

    /// The first character of a value or a key.
    fn item(&mut self, c: char, out: &mut String) -> Step {
        let key = self.at == At::Key;
        match self.stack.last() {
            Some(&(close, _)) if close == c && (key || close != '}') => return self.pop(out),
            _ => {}
        }
        match c {
            '{' | '[' | '(' if !key => {
                if self.stack.len() >= MAX_DEPTH || c == '(' && self.quote.is_some() {
                    return Step::Broken;
                }
                self.comma(false, out);
                let (open, close) = if c == '{' { ('{', '}') } else { ('[', if c == '[' { ']' } else { ')' }) };
                out.push(open);
                self.stack.push((close, false));
                self.at = if c == '{' { At::Key } else { At::Value };
                Step::More
            }
            '"' | '\'' => {
                self.comma(key, out);
                out.push('"');
                self.at = At::Text { quote: c, key };
                Step::More
            }
            _ if self.quote.as_ref().is_some_and(|quote| quote.starts_with(c)) => {
                self.at = At::Open { key };
                self.open(c, key, out)
            }
            _ if self.is_word(c) => {
                self.word.clear();
                self.word.push(c);
                self.at = At::Word { key };
                Step::More
            }
            _ => Step::Broken,
        }
    }

    fn open(&mut self, c: char, key: bool, out: &mut String) -> Step {
        let quote = self.quote.clone().unwrap_or_default();
        let mut text = String::new();
        match self.scan.push(c, &[quote.as_str()], &mut text) {
            Some(_) => {
                self.comma(key, out);
                out.push('"');
                self.at = At::Marked { key };
                Step::More
            }
            None if text.is_empty() => Step::More,
            None => Step::Broken,
        }
    }

    fn marked(&mut self, c: char, key: bool, out: &mut String) -> Step {
        let quote = self.quote.clone().unwrap_or_default();
        let mut text = String::new();
        let found = self.scan.push(c, &[quote.as_str()], &mut text);
        text.chars().for_each(|c| push_escaped(c, out));
        if found.is_none() { Step::More } else { self.end_text(key, out) }
    }

    fn end_text(&mut self, key: bool, out: &mut String) -> Step {
        out.push('"');
        if key {
            self.at = At::Colon;
            return Step::More;
        }
        self.ended()
    }

    fn is_word(&self, c: char) -> bool {
        match self.quote {
            Some(_) => !",:{}[]".contains(c),
            None => c.is_ascii_alphanumeric() || "+-._".contains(c),
        }
    }

    fn word(&mut self, c: char, key: bool, out: &mut String) -> Step {
        if self.is_word(c) || !key && c == ':' && self.quote.is_some() {
            self.word.push(c);
            return if self.word.len() > MAX_WORD { Step::Broken } else { Step::More };
        }
        let word = std::mem::take(&mut self.word);
        let word = word.trim();
        let value = match (number_or_name(word), self.quote.is_some()) {
            (Some(_), _) if key => quoted(word),
            (Some(value), _) => value,
            (None, true) => quoted(word),
            (None, false) => return Step::Broken,
        };
        self.comma(key, out);
        out.push_str(&value);
        if key {
            self.at = At::Colon;
            return self.push(c, out);
        }
        match self.ended() {
            Step::Done => Step::Before,
            _ => self.push(c, out),
        }
    }

    fn text(&mut self, c: char, quote: char, key: bool, out: &mut String) -> Step {
        if let Some(escape) = &mut self.escape {
            escape.push(c);
            let escape = escape.clone();
            self.escaped(&escape, out);
            return Step::More;
        }
        if c == '\\' {
            self.escape = Some(String::new());
            return Step::More;
        }
        self.lone(out);
        if c == quote {
            return self.end_text(key, out);
        }
        push_escaped(c, out);
        Step::More
    }

    /// An escape of Python or JSON, which may be unfinished.
    fn escaped(&mut self, escape: &str, out: &mut String) {
        let len = match escape.as_bytes()[0] {
            b'x' => 3,
            b'u' => 5,
            b'U' => 9,
            _ => 1,
        };
        let digits = if len > 1 { &escape[1..] } else { "" };
        if len > 1 && !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            self.escape = None;
            self.lone(out);
            out.push_str("\\\\");
            escape.chars().for_each(|c| push_escaped(c, out));
            return;
        }
        if escape.len() < len {
            return;
        }
        self.escape = None;
        if len > 1 {
            return self.unit(u32::from_str_radix(digits, 16).unwrap_or(0xfffd), out);
        }
        self.lone(out);
        let c = match escape {
            "n" => '\n',
            "t" => '\t',
            "r" => '\r',
            "b" => '\x08',
            "f" => '\x0c',
            "a" => '\x07',
            "v" => '\x0b',
            "0" => '\0',
            "\\" | "'" | "\"" | "/" => escape.chars().next().unwrap_or_default(),
            "\n" => return,
            // Any other backslash means itself.
            _ => {
                out.push_str("\\\\");
                escape.chars().next().unwrap_or_default()
            }
        };
        push_escaped(c, out);
    }

    fn unit(&mut self, unit: u32, out: &mut String) {
        match (unit, self.high) {
            (0xd800..=0xdbff, _) => {
                self.lone(out);
                self.high = Some(unit);
            }
            (0xdc00..=0xdfff, Some(high)) => {
                self.high = None;
                let c = char::from_u32(0x10000 + ((high - 0xd800) << 10) + (unit - 0xdc00));
                push_escaped(c.unwrap_or('\u{fffd}'), out);
            }
            _ => {
                self.lone(out);
                push_escaped(char::from_u32(unit).unwrap_or('\u{fffd}'), out);
            }
        }
    }

    /// What stands for the half of a surrogate pair without the other half.
    fn lone(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push('\u{fffd}');
        }
    }
}

/// A number, a truth value or nothing, as JSON.
fn number_or_name(word: &str) -> Option<String> {
    match word {
        "True" | "true" => return Some("true".into()),
        "False" | "false" => return Some("false".into()),
        "None" | "null" => return Some("null".into()),
        _ => {}
    }
    let mut number = word.replace('_', "");
    if let Some(rest) = number.strip_prefix('+') {
        number = rest.to_owned();
    }
    if let Some(point) = number.find('.') {
        if !number[point + 1..].starts_with(|c: char| c.is_ascii_digit()) {
            number.insert(point + 1, '0');
        }
        if !number[..point].ends_with(|c: char| c.is_ascii_digit()) {
            number.insert(point, '0');
        }
    }
    is_number(&number).then_some(number)
}

#[cfg(test)]
mod tests;
