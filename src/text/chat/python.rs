//! Values in the form in which Python prints them.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Output, State, Value};

/// Lists and dictionaries within each other that a template may print.
pub(super) const MAX_DEPTH: usize = 256;

/// Writes a value where a template prints it: `str(value)` of Python, and nothing for an undefined value.
pub(super) fn print(output: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => output.write_str(text).map_err(Error::from),
        None => output.write_str(&str(state, value)?).map_err(Error::from),
    }
}

/// `str(value)` of Python.
pub(super) fn str(state: &State, value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => text.push_str(value.as_str().unwrap_or_default()),
        _ => write_repr(state, &mut text, value, 0)?,
    }
    Ok(text)
}

/// `repr(value)` of Python.
pub(super) fn repr(state: &State, value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_repr(state, &mut text, value, 0)?;
    Ok(text)
}

/// Appends `repr(value)` of Python.
fn write_repr(state: &State, text: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    step(state, depth)?;
    match value.kind() {
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::String => {
            let string = value.as_str().unwrap_or_default();
            state.consume_fuel(string.len() as u64 / 64)?;
            quote(text, string);
        }
        ValueKind::Seq => {
            let is_tuple = value.is_tuple();
            text.push(if is_tuple { '(' } else { '[' });
            for (at, item) in value.try_iter()?.enumerate() {
                text.push_str(if at > 0 { ", " } else { "" });
                write_repr(state, text, &item, depth + 1)?;
            }
            text.push_str(if is_tuple && value.len() == Some(1) { "," } else { "" });
            text.push(if is_tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            text.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                text.push_str(if at > 0 { ", " } else { "" });
                write_repr(state, text, &key, depth + 1)?;
                text.push_str(": ");
                write_repr(state, text, &value.get_item(&key)?, depth + 1)?;
            }
            text.push('}');
        }
        _ => write!(text, "{value}").expect("a string takes everything"),
    }
    Ok(())
}

/// Counts a step of a walk through a value, and bounds its depth.
pub(super) fn step(state: &State, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        let words = format!("a value has more than {MAX_DEPTH} lists and dictionaries within each other");
        return Err(Error::new(ErrorKind::InvalidOperation, words));
    }
    state.consume_fuel(1)
}

/// `repr` of an integer or a float.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => float(number),
        _ => value.to_string(),
    }
}

/// `repr` of a float: the shortest digits that give the same float, in full between 1e-4 and 1e16.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a whole exponent");
    match exponent {
        -4..16 => format!("{number:?}"),
        _ => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// Appends `repr` of a string.
fn quote(text: &mut String, string: &str) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in string.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == quote => text.extend(['\\', c]),
            ' '..='~' => text.push(c),
            c if is_printable(c) => text.push(c),
            c => write_escape(text, c),
        }
    }
    text.push(quote);
}

/// Whether Python prints a character as it is. Rust escapes the same ones, but combining marks at a start in addition.
fn is_printable(c: char) -> bool {
    let mut buffer = [b'a'; 5];
    let length = c.encode_utf8(&mut buffer[1..]).len();
    let pair = std::str::from_utf8(&buffer[..=length]).expect("both are UTF-8");
    pair.escape_debug().count() == 2
}

fn write_escape(text: &mut String, c: char) {
    let code = u32::from(c);
    let written = match code {
        0..=0xff => write!(text, "\\x{code:02x}"),
        0x100..=0xffff => write!(text, "\\u{code:04x}"),
        _ => write!(text, "\\U{code:08x}"),
    };
    written.expect("a string takes everything");
}
