//! A JSON text that is checked as it comes, repaired where that is certain, and closed where it breaks.

use crate::escape::push_escaped_control;

/// The deepest nesting of objects and arrays.
pub(crate) const MAX_DEPTH: usize = 64;

/// The most white space that is kept behind a comma.
const MAX_SPACE: usize = 64;

/// What became of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It was taken.
    More,
    /// It was taken and ends the value.
    Done,
    /// The value had ended before it; it was not taken.
    Before,
    /// It cannot stand here; it was not taken. `close` still makes the text whole.
    Broken,
}

#[derive(Clone, Copy, PartialEq)]
enum At {
    Value,
    FirstItem,
    FirstKey,
    Key,
    Colon,
    After,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Unicode {
        key: bool,
    },
    Number(Digits),
    /// A name and how much of it came. It is held back: other languages have other names.
    Literal(&'static str, usize),
    End,
}

/// The parts of a number.
#[derive(Clone, Copy, PartialEq)]
enum Digits {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

/// One JSON value.
///
/// Line breaks and other control characters inside a string, unknown escapes, halves of surrogate pairs and a comma
/// before a closing bracket are repaired. A comma and an unfinished escape are held back until what follows is known.
pub(crate) struct JsonStream {
    at: At,
    /// For each open container, whether it is an object.
    stack: Vec<bool>,
    held: String,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

impl JsonStream {
    pub(crate) fn new() -> Self {
        Self { at: At::Value, stack: Vec::new(), held: String::new(), high: None }
    }

    /// Takes `c` and gives the text that is certain to `out`.
    pub(crate) fn push(&mut self, c: char, out: &mut String) -> Step {
        match self.at {
            At::Text { key } => self.text(c, key, out),
            At::Escape { key } => self.escape(c, key, out),
            At::Unicode { key } => self.unicode(c, key, out),
            At::Number(part) => self.number(c, part, out),
            At::Literal(name, len) => self.literal(c, name, len, out),
            At::End => Step::Before,
            _ if matches!(c, ' ' | '\t' | '\n' | '\r') => self.space(c, out),
            At::Value | At::FirstItem => self.value(c, out),
            At::FirstKey | At::Key => self.key(c, out),
            At::Colon if c == ':' => self.go(c, At::Value, out),
            At::Colon => Step::Broken,
            At::After => self.after(c, out),
        }
    }

    /// Ends the text: gives what is missing to make a JSON value of it.
    pub(crate) fn close(&mut self, out: &mut String) {
        self.flush_high(out);
        if let At::Literal(name, _) = self.at {
            self.held.push_str(name);
            self.flush(out);
        }
        self.held.clear();
        let in_container = !self.stack.is_empty();
        match self.at {
            At::Text { key } | At::Escape { key } | At::Unicode { key } => {
                out.push_str(if key { "\":null" } else { "\"" });
            }
            At::Colon => out.push_str(":null"),
            // Behind a comma of an array, which is held back, nothing is missing.
            At::Value if !in_container || self.stack.last() == Some(&true) => out.push_str("null"),
            At::Number(Digits::Minus | Digits::Point | Digits::E | Digits::Sign) => out.push('0'),
            _ => {}
        }
        while let Some(object) = self.stack.pop() {
            out.push(if object { '}' } else { ']' });
        }
        self.at = At::End;
    }

    fn go(&mut self, c: char, at: At, out: &mut String) -> Step {
        out.push(c);
        self.at = at;
        Step::More
    }

    /// The state after a value.
    fn ended(&mut self) -> Step {
        self.at = if self.stack.is_empty() { At::End } else { At::After };
        if self.stack.is_empty() { Step::Done } else { Step::More }
    }

    fn space(&mut self, c: char, out: &mut String) -> Step {
        match self.held.is_empty() {
            true if self.stack.is_empty() => {}
            true => out.push(c),
            false if self.held.len() <= MAX_SPACE => self.held.push(c),
            false => {}
        }
        Step::More
    }

    fn value(&mut self, c: char, out: &mut String) -> Step {
        if c == ']' && (self.at == At::FirstItem || !self.held.is_empty()) {
            return self.pop(c, out);
        }
        let next = match c {
            '{' | '[' if self.stack.len() >= MAX_DEPTH => return Step::Broken,
            '{' => At::FirstKey,
            '[' => At::FirstItem,
            '"' => At::Text { key: false },
            '-' => At::Number(Digits::Minus),
            '0' => At::Number(Digits::Zero),
            '1'..='9' => At::Number(Digits::Whole),
            't' | 'f' | 'n' => {
                let name = if c == 't' {
                    "true"
                } else if c == 'f' {
                    "false"
                } else {
                    "null"
                };
                self.at = At::Literal(name, 1);
                return Step::More;
            }
            _ => return Step::Broken,
        };
        if matches!(c, '{' | '[') {
            self.stack.push(c == '{');
        }
        self.flush(out);
        self.go(c, next, out)
    }

    fn key(&mut self, c: char, out: &mut String) -> Step {
        match c {
            '"' => {
                self.flush(out);
                self.go(c, At::Text { key: true }, out)
            }
            '}' => self.pop(c, out),
            _ => Step::Broken,
        }
    }

    fn after(&mut self, c: char, out: &mut String) -> Step {
        let object = self.stack.last() == Some(&true);
        match c {
            ',' => {
                self.held.push(c);
                self.at = if object { At::Key } else { At::Value };
                Step::More
            }
            '}' if object => self.pop(c, out),
            ']' if !object => self.pop(c, out),
            _ => Step::Broken,
        }
    }

    fn pop(&mut self, c: char, out: &mut String) -> Step {
        self.held.clear();
        self.stack.pop();
        out.push(c);
        self.ended()
    }

    fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    fn text(&mut self, c: char, key: bool, out: &mut String) -> Step {
        if c == '\\' {
            self.held.push(c);
            self.at = At::Escape { key };
            return Step::More;
        }
        self.flush_high(out);
        if c == '"' {
            out.push(c);
            if key {
                self.at = At::Colon;
                return Step::More;
            }
            return self.ended();
        }
        push_escaped_control(c, out);
        Step::More
    }

    fn escape(&mut self, c: char, key: bool, out: &mut String) -> Step {
        self.at = At::Text { key };
        match c {
            'u' => {
                self.held.push(c);
                self.at = At::Unicode { key };
                return Step::More;
            }
            '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => {
                self.flush_high(out);
                self.held.push(c);
            }
            // `\'` is a quote of another language; any other backslash means itself.
            '\'' => {
                self.flush_high(out);
                self.held = "'".into();
            }
            _ => {
                self.flush_high(out);
                self.held.push('\\');
                push_escaped_control(c, &mut self.held);
            }
        }
        self.flush(out);
        Step::More
    }

    fn unicode(&mut self, c: char, key: bool, out: &mut String) -> Step {
        if !c.is_ascii_hexdigit() {
            // The escape is not one: its backslash means itself.
            self.flush_high(out);
            out.push('\\');
            self.flush(out);
            self.at = At::Text { key };
            return self.text(c, key, out);
        }
        self.held.push(c);
        if self.held.len() < 6 {
            return Step::More;
        }
        let unit = u32::from_str_radix(&self.held[2..], 16).unwrap_or(0xfffd);
        self.at = At::Text { key };
        match (unit, self.high) {
            (0xd800..=0xdbff, _) => {
                self.flush_high(out);
                self.high = Some(unit);
                self.held.clear();
            }
            (0xdc00..=0xdfff, Some(high)) => {
                self.high = None;
                out.push_str(&format!("\\u{high:04x}"));
                self.flush(out);
            }
            (0xdc00..=0xdfff, None) => {
                self.held.clear();
                out.push('\u{fffd}');
            }
            _ => {
                self.flush_high(out);
                self.flush(out);
            }
        }
        Step::More
    }

    /// A half of a surrogate pair without the other half.
    fn flush_high(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push('\u{fffd}');
        }
    }

    fn number(&mut self, c: char, part: Digits, out: &mut String) -> Step {
        use Digits::{E, Exponent, Fraction, Minus, Point, Sign, Whole, Zero};
        let next = match (part, c) {
            (Minus, '0') => Zero,
            (Minus, '1'..='9') | (Whole, '0'..='9') => Whole,
            (Zero | Whole, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Whole | Fraction, 'e' | 'E') => E,
            (E, '+' | '-') => Sign,
            (E | Sign | Exponent, '0'..='9') => Exponent,
            (Minus | Point | E | Sign, _) | (Zero, '0'..='9') => return Step::Broken,
            (Zero | Whole | Fraction | Exponent, _) => {
                return match self.ended() {
                    Step::Done => Step::Before,
                    _ => self.push(c, out),
                };
            }
        };
        self.go(c, At::Number(next), out)
    }

    fn literal(&mut self, c: char, name: &'static str, len: usize, out: &mut String) -> Step {
        if !name[len..].starts_with(c) {
            // As if the value had not begun.
            self.at = At::Value;
            return Step::Broken;
        }
        if len + 1 < name.len() {
            self.at = At::Literal(name, len + 1);
            return Step::More;
        }
        self.held.push_str(name);
        self.flush(out);
        self.ended()
    }

    /// Whether the characters so far were given; otherwise they may turn out not to be JSON.
    pub(crate) fn is_certain(&self) -> bool {
        !matches!(self.at, At::Literal(..))
    }
}

/// Whether the text is a number of JSON, of any size.
pub(crate) fn is_number(text: &str) -> bool {
    let (mut json, mut out) = (JsonStream::new(), String::new());
    text.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        && text.chars().all(|c| json.push(c, &mut out) == Step::More)
        && json.push(' ', &mut out) == Step::Before
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn run(text: &str) -> (String, Option<char>) {
        let (mut stream, mut out) = (JsonStream::new(), String::new());
        let broken = text.chars().find(|&c| stream.push(c, &mut out) == Step::Broken);
        stream.close(&mut out);
        (out, broken)
    }

    #[test]
    fn a_whole_text_passes_unchanged() {
        for text in [r#"{"a": [1, -0.5e+3, true, null, "\ud83d\ude00\n\"x"], "b": {}}"#, "[]", "[ ]", "12", r#""é""#] {
            assert_eq!(run(text), (text.to_owned(), None));
        }
    }

    #[test]
    fn every_prefix_of_a_text_is_closed_to_valid_json() {
        let text = r#"{"a": [1, -0.5e+3, true, {"k\u00e9y": null}, "\ud83d\ude00 \\ \n"] , "b": {"c": false}}"#;
        for end in (1..text.len()).filter(|&end| text.is_char_boundary(end)) {
            let (closed, broken) = run(&text[..end]);
            assert_eq!(broken, None);
            assert!(serde_json::from_str::<Value>(&closed).is_ok(), "{} -> {closed}", &text[..end]);
        }
    }

    #[test]
    fn what_is_certain_is_repaired_and_the_rest_breaks() {
        let value = |text: &str| serde_json::from_str::<Value>(&run(text).0).unwrap();
        assert_eq!(value("{\"a\": \"x\ny\\d\\'\\ud800z\",}"), json!({"a": "x\ny\\d'\u{fffd}z"}));
        assert_eq!(value("[1, 2, ]"), json!([1, 2]));
        assert_eq!(value(r#"{"a": "\u12zz"}"#), json!({"a": "\\u12zz"}));
        for (text, closed, broken) in [
            (r#"{"a": 1 x"#, r#"{"a": 1 }"#, 'x'),
            ("{'a'", "{}", '\''),
            ("[01]", "[0]", '1'),
            (r#"{"a": None"#, r#"{"a": null}"#, 'N'),
        ] {
            assert_eq!(run(text), (closed.to_owned(), Some(broken)));
        }
        let deep = "[".repeat(1000);
        assert_eq!(run(&deep), ("[".repeat(MAX_DEPTH) + &"]".repeat(MAX_DEPTH), Some('[')));
    }
}
