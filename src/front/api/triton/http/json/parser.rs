//! The parser.

use std::borrow::Cow;
use std::ffi::CStr;

use serving::{InferError, Limit, Limits};

use super::value::{Array, Value, double};

/// Maximum nesting.
pub const MAX_DEPTH: usize = 128;

/// Maximum members other than inputs and parameters.
const OTHER_MEMBERS: u64 = 64;

/// Ignored at the start of a text.
const BYTE_ORDER_MARK: char = '\u{feff}';

type Result<T> = std::result::Result<T, InferError>;

/// Parses a body.
///
/// # Errors
/// When it is not JSON, with the reason and the offset, or when its objects have more members than the limits of inputs and
/// parameters allow.
pub fn parse<'a>(body: &'a [u8], limits: &Limits) -> Result<Value<'a>> {
    // A NUL byte ends the text, as for Triton's parser: binary tensors may follow if a client omits the length of the head.
    let body = CStr::from_bytes_until_nul(body).map_or(body, CStr::to_bytes);
    let text =
        std::str::from_utf8(body).map_err(|error| malformed("Invalid encoding in string.", error.valid_up_to()))?;
    let (inputs, parameters) = (limits.get(Limit::Inputs), limits.get(Limit::Parameters));
    let max_members = inputs.saturating_add(parameters.saturating_mul(2)).saturating_add(OTHER_MEMBERS);
    let mut parser = Parser { text, at: 0, depth: 0, num_members: 0, max_members };
    if text.starts_with(BYTE_ORDER_MARK) {
        parser.at = BYTE_ORDER_MARK.len_utf8();
    }
    parser.skip_space();
    if parser.peek().is_none() {
        return Err(malformed("The document is empty.", parser.at));
    }
    let value = parser.value()?;
    parser.skip_space();
    if parser.peek().is_some() {
        return Err(malformed("The document root must not be followed by other values.", parser.at));
    }
    Ok(value)
}

fn malformed(what: &str, at: usize) -> InferError {
    InferError::internal(format!("failed to parse the request JSON buffer: {what} at {at}"))
}

fn unclosed_string(at: usize) -> InferError {
    malformed("Missing a closing quotation mark in string.", at)
}

fn control_character(at: usize) -> InferError {
    malformed("Invalid escape character in string.", at)
}

pub(super) struct Parser<'a> {
    text: &'a str,
    pub(super) at: usize,
    depth: usize,
    /// Members of the objects in memory. Objects in arrays are dropped with their element.
    num_members: u64,
    max_members: u64,
}

impl<'a> Parser<'a> {
    /// A parser of text that was already checked.
    pub(super) fn of_checked(text: &'a str) -> Self {
        Self { text, at: 0, depth: 0, num_members: 0, max_members: u64::MAX }
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> bool {
        let taken = self.peek() == Some(byte);
        self.at += usize::from(taken);
        taken
    }

    pub(super) fn value(&mut self) -> Result<Value<'a>> {
        match self.peek() {
            Some(b'{') => self.object(),
            Some(b'[') => {
                let start = self.at;
                self.array(|_| Ok(()))?;
                Ok(Value::Array(Array(&self.text[start..self.at])))
            }
            Some(b'"') => self.string().map(Value::String),
            Some(b't') => self.literal("true", Value::Bool(true)),
            Some(b'f') => self.literal("false", Value::Bool(false)),
            Some(b'n') => self.literal("null", Value::Null),
            _ => self.number().map(Value::Number),
        }
    }

    fn literal(&mut self, word: &str, value: Value<'a>) -> Result<Value<'a>> {
        let rest = &self.text.as_bytes()[self.at..];
        let matching = word.bytes().zip(rest).take_while(|(wanted, found)| wanted == *found).count();
        self.at += matching;
        if matching < word.len() {
            return Err(malformed("Invalid value.", self.at));
        }
        Ok(value)
    }

    fn enter(&mut self) -> Result<()> {
        self.depth += 1;
        self.at += 1;
        if self.depth > MAX_DEPTH {
            return Err(InferError::invalid(format!(
                "failed to parse the request JSON buffer: nested deeper than {MAX_DEPTH} levels at {}",
                self.at
            )));
        }
        self.skip_space();
        Ok(())
    }

    pub(super) fn array(&mut self, mut visit: impl FnMut(Value<'a>) -> Result<()>) -> Result<()> {
        self.enter()?;
        if !self.take(b']') {
            loop {
                let num_members = self.num_members;
                let value = self.value()?;
                visit(value)?;
                self.num_members = num_members;
                self.skip_space();
                if self.take(b']') {
                    break;
                }
                if !self.take(b',') {
                    return Err(malformed("Missing a comma or ] after an array element.", self.at));
                }
                self.skip_space();
            }
        }
        self.depth -= 1;
        Ok(())
    }

    fn object(&mut self) -> Result<Value<'a>> {
        self.enter()?;
        let mut members = Vec::new();
        if !self.take(b'}') {
            loop {
                self.num_members += 1;
                if self.num_members > self.max_members {
                    return Err(Limit::Parameters.refuse(self.num_members, self.max_members));
                }
                members.push(self.member()?);
                self.skip_space();
                if self.take(b'}') {
                    break;
                }
                if !self.take(b',') {
                    return Err(malformed("Missing a comma or '}' after an object member.", self.at));
                }
                self.skip_space();
            }
        }
        self.depth -= 1;
        Ok(Value::Object(members))
    }

    fn member(&mut self) -> Result<(Cow<'a, str>, Value<'a>)> {
        if self.peek() != Some(b'"') {
            return Err(malformed("Missing a name for object member.", self.at));
        }
        let key = self.string()?;
        self.skip_space();
        if !self.take(b':') {
            return Err(malformed("Missing a colon after a name of object member.", self.at));
        }
        self.skip_space();
        Ok((key, self.value()?))
    }

    fn string(&mut self) -> Result<Cow<'a, str>> {
        let start = self.at + 1;
        let bytes = self.text.as_bytes();
        let mut end = start;
        loop {
            match bytes.get(end) {
                Some(b'"') => break,
                Some(b'\\') => return self.escaped_string(start, end).map(Cow::Owned),
                Some(0..0x20) => return Err(control_character(end)),
                Some(_) => end += 1,
                None => return Err(unclosed_string(end)),
            }
        }
        self.at = end + 1;
        Ok(Cow::Borrowed(&self.text[start..end]))
    }

    /// Parses a string from `start` whose first backslash is at `at`.
    fn escaped_string(&mut self, start: usize, at: usize) -> Result<String> {
        let bytes = self.text.as_bytes();
        let mut value = self.text[start..at].to_owned();
        let mut at = at;
        loop {
            let run = bytes[at..].iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < 0x20);
            let end = at + run.ok_or_else(|| unclosed_string(bytes.len()))?;
            value.push_str(&self.text[at..end]);
            match bytes[end] {
                b'"' => {
                    self.at = end + 1;
                    return Ok(value);
                }
                b'\\' => {
                    let (character, next) = self.escape(end)?;
                    value.push(character);
                    at = next;
                }
                _ => return Err(control_character(end)),
            }
        }
    }

    /// The character of the escape at `at`, and the offset of its end.
    fn escape(&self, at: usize) -> Result<(char, usize)> {
        let invalid = || malformed("Invalid escape character in string.", at);
        let character = match self.text.as_bytes().get(at + 1).ok_or_else(invalid)? {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => return self.unicode_escape(at),
            _ => return Err(invalid()),
        };
        Ok((character, at + 2))
    }

    fn unicode_escape(&self, at: usize) -> Result<(char, usize)> {
        let invalid = || malformed("Incorrect hex digit after \\u escape in string.", at);
        let unit = |at: usize| {
            let digits = self.text.get(at + 2..at + 6).filter(|_| self.text[at..].starts_with("\\u"))?;
            digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u16::from_str_radix(digits, 16).ok())?
        };
        let first = unit(at).ok_or_else(invalid)?;
        if let Some(character) = char::from_u32(u32::from(first)) {
            return Ok((character, at + 6));
        }
        let surrogate = || malformed("The surrogate pair in string is invalid.", at);
        let pair = [first, unit(at + 6).ok_or_else(surrogate)?];
        match char::decode_utf16(pair).next() {
            Some(Ok(character)) => Ok((character, at + 12)),
            _ => Err(surrogate()),
        }
    }

    fn number(&mut self) -> Result<&'a str> {
        let start = self.at;
        let negative = self.take(b'-');
        if let Some(word) = ["NaN", "Infinity", "Inf"].into_iter().find(|word| self.text[self.at..].starts_with(word)) {
            self.at += word.len();
            return Ok(if word == "NaN" {
                "NaN"
            } else if negative {
                "-inf"
            } else {
                "inf"
            });
        }
        if !self.take(b'0') && self.digits() == 0 {
            return Err(malformed("Invalid value.", self.at));
        }
        if self.take(b'.') && self.digits() == 0 {
            return Err(malformed("Miss fraction part in number.", self.at));
        }
        if self.take(b'e') || self.take(b'E') {
            let _ = self.take(b'+') || self.take(b'-');
            if self.digits() == 0 {
                return Err(malformed("Miss exponent in number.", self.at));
            }
        }
        let text = &self.text[start..self.at];
        let may_be_large = text.len() > f64::MAX_10_EXP as usize || text.contains(['e', 'E']);
        if may_be_large && double(text).is_infinite() {
            return Err(malformed("Number too big to be stored in double.", start));
        }
        Ok(text)
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        self.at - start
    }
}
