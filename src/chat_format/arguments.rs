//! The value of `arguments` in a JSON call: an object, a string that holds one, or null.

use crate::json::{JsonStream, Step};

/// Streams the arguments as the text of a JSON object.
pub(crate) struct Arguments {
    at: At,
    json: JsonStream,
}

enum At {
    First,
    Object,
    Text(Decoder),
    Null(&'static str),
    End,
}

impl Arguments {
    pub(crate) fn new() -> Self {
        Self { at: At::First, json: JsonStream::new() }
    }

    pub(crate) fn push(&mut self, c: char, out: &mut String) -> Step {
        match &mut self.at {
            At::First => self.first(c, out),
            At::Object => self.object(c, out),
            At::Text(decoder) => match decoder.push(c) {
                Decoded::End => {
                    self.close(out);
                    Step::Done
                }
                Decoded::Broken => Step::Broken,
                Decoded::Chars(first, second) => {
                    let broken = [first, second].into_iter().flatten().any(|c| self.inner(c, out) == Step::Broken);
                    if broken { Step::Broken } else { Step::More }
                }
            },
            At::Null(rest) if rest.starts_with(c) => match &rest[1..] {
                "" => {
                    self.close(out);
                    Step::Done
                }
                rest => {
                    self.at = At::Null(rest);
                    Step::More
                }
            },
            At::Null(_) => Step::Broken,
            At::End => Step::Before,
        }
    }

    /// Whether the characters so far were given; otherwise they may turn out not to be JSON.
    pub(crate) fn is_certain(&self) -> bool {
        !matches!(self.at, At::Object) || self.json.is_certain()
    }

    /// Gives what is missing to make an object of the text.
    pub(crate) fn close(&mut self, out: &mut String) {
        match std::mem::replace(&mut self.at, At::End) {
            At::First | At::Null(_) => out.push_str("{}"),
            At::Object => self.json.close(out),
            At::Text(decoder) if !decoder.has_text => out.push_str("{}"),
            At::Text(_) => self.json.close(out),
            At::End => {}
        }
    }

    fn first(&mut self, c: char, out: &mut String) -> Step {
        match c {
            '{' => {
                self.at = At::Object;
                return self.object(c, out);
            }
            '"' => self.at = At::Text(Decoder::default()),
            'n' => self.at = At::Null("ull"),
            _ if c.is_ascii_whitespace() => {}
            _ => return Step::Broken,
        }
        Step::More
    }

    fn object(&mut self, c: char, out: &mut String) -> Step {
        let step = self.json.push(c, out);
        if step == Step::Done {
            self.at = At::End;
        }
        step
    }

    /// A character of the text inside the string.
    fn inner(&mut self, c: char, out: &mut String) -> Step {
        let At::Text(decoder) = &mut self.at else { return Step::Broken };
        if !decoder.has_text {
            return match c {
                '{' => {
                    decoder.has_text = true;
                    self.json.push(c, out)
                }
                _ if c.is_ascii_whitespace() => Step::More,
                _ => Step::Broken,
            };
        }
        match self.json.push(c, out) {
            Step::Before if c.is_ascii_whitespace() => Step::More,
            Step::Before => Step::Broken,
            step => step,
        }
    }
}

/// Reads the characters of a JSON string.
#[derive(Default)]
struct Decoder {
    escape: Option<String>,
    high: Option<u32>,
    has_text: bool,
}

enum Decoded {
    /// The characters that are certain now.
    Chars(Option<char>, Option<char>),
    End,
    Broken,
}

impl Decoder {
    fn push(&mut self, c: char) -> Decoded {
        match &mut self.escape {
            None if c == '\\' => {
                self.escape = Some(String::new());
                Decoded::Chars(None, None)
            }
            None if c == '"' => Decoded::End,
            None => Decoded::Chars(self.lone(), Some(c)),
            Some(escape) => {
                escape.push(c);
                let escape = escape.clone();
                self.escaped(&escape)
            }
        }
    }

    fn escaped(&mut self, escape: &str) -> Decoded {
        let c = match escape {
            "n" => '\n',
            "t" => '\t',
            "r" => '\r',
            "b" => '\x08',
            "f" => '\x0c',
            "\"" | "\\" | "/" | "'" => escape.chars().next().unwrap_or_default(),
            _ if !escape.starts_with('u') || !escape[1..].bytes().all(|b| b.is_ascii_hexdigit()) => {
                return Decoded::Broken;
            }
            _ if escape.len() < 5 => return Decoded::Chars(None, None),
            _ => {
                self.escape = None;
                return self.unit(u32::from_str_radix(&escape[1..], 16).unwrap_or(0xfffd));
            }
        };
        self.escape = None;
        Decoded::Chars(self.lone(), Some(c))
    }

    fn unit(&mut self, unit: u32) -> Decoded {
        match (unit, self.high) {
            (0xd800..=0xdbff, _) => {
                let lone = self.lone();
                self.high = Some(unit);
                Decoded::Chars(lone, None)
            }
            (0xdc00..=0xdfff, Some(high)) => {
                self.high = None;
                Decoded::Chars(char::from_u32(0x10000 + ((high - 0xd800) << 10) + (unit - 0xdc00)), None)
            }
            _ => Decoded::Chars(self.lone(), Some(char::from_u32(unit).unwrap_or('\u{fffd}'))),
        }
    }

    /// What stands for the half of a surrogate pair without the other half.
    fn lone(&mut self) -> Option<char> {
        self.high.take().map(|_| '\u{fffd}')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> (String, Step) {
        let (mut arguments, mut out, mut last) = (Arguments::new(), String::new(), Step::More);
        for c in text.chars() {
            last = arguments.push(c, &mut out);
            if last != Step::More {
                break;
            }
        }
        arguments.close(&mut out);
        (out, last)
    }

    #[test]
    fn an_object_a_string_that_holds_one_and_null_are_arguments() {
        for (text, json) in [
            (r#" {"a": "}"}"#, r#"{"a": "}"}"#),
            (r#""{\"a\": \"x\\n\\\"\ud83d\ude00\u00e9\"}""#, r#"{"a": "x\n\"😀é"}"#),
            ("null", "{}"),
            (r#""""#, "{}"),
            (r#"" {} ""#, "{}"),
        ] {
            assert_eq!(run(text), (json.to_owned(), Step::Done), "{text}");
        }
        for (text, json) in
            [("[1]", "{}"), (r#""x""#, "{}"), (r#""{\"a\": 1}x""#, r#"{"a": 1}"#), ("{\"a\":'", "{\"a\":null}")]
        {
            assert_eq!(run(text), (json.to_owned(), Step::Broken), "{text}");
        }
    }
}
