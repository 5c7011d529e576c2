//! Methods of Python's strings, lists and dictionaries that templates call.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::words;

/// Longest number in a string that `format` formats: it bounds widths and precisions.
const MAX_FORMAT_DIGITS: usize = 4;

/// The arguments of a call.
struct Arguments<'a> {
    positional: &'a [Value],
    named: Kwargs,
}

/// Calls a method of a value.
pub(super) fn call(state: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => string(state, value.as_str().unwrap_or_default(), method, arguments)?,
        ValueKind::Seq => list(value, method, arguments)?,
        ValueKind::Map if method == "copy" => Some(value.clone()),
        _ => None,
    };
    own.map_or_else(|| pycompat::unknown_method_callback(state, value, method, arguments), Ok)
}

impl<'a> Arguments<'a> {
    fn of(arguments: &'a [Value]) -> Result<Self, Error> {
        match arguments.split_last() {
            Some((last, positional)) if last.is_kwargs() => {
                Ok(Self { positional, named: Kwargs::try_from(last.clone())? })
            }
            _ => Ok(Self { positional: arguments, named: Kwargs::from_iter(std::iter::empty::<(String, Value)>()) }),
        }
    }

    /// An argument by its place or its name; `None` if it is absent or none.
    fn get(&self, at: usize, name: &str) -> Result<Option<Value>, Error> {
        let value = match self.positional.get(at) {
            Some(value) => Some(value.clone()),
            None => self.named.get(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    }

    fn text(&self, at: usize, name: &str) -> Result<Option<String>, Error> {
        let text =
            |value: Value| value.as_str().map(str::to_owned).ok_or_else(|| wrong(format!("`{name}` must be text")));
        self.get(at, name)?.map(text).transpose()
    }

    /// Text that must be given.
    fn needed(&self, at: usize, name: &str) -> Result<String, Error> {
        self.text(at, name)?.ok_or_else(|| wrong(format!("the argument `{name}` is missing")))
    }

    fn number(&self, at: usize, name: &str) -> Result<Option<i64>, Error> {
        self.get(at, name)?.map(i64::try_from).transpose()
    }

    /// Refuses arguments that the method does not have; it has `limit` positional ones.
    fn end(&self, limit: usize) -> Result<(), Error> {
        if self.positional.len() > limit {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        self.named.assert_all_used()
    }
}

/// A method of a string; `None` for one that is not known here.
fn string(state: &State, text: &str, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let given = Arguments::of(arguments)?;
    let (value, limit) = match method {
        "split" | "rsplit" => {
            let separator = given.text(0, "sep")?;
            let most = given.number(1, "maxsplit")?.and_then(|most| usize::try_from(most).ok());
            (Value::from(words::split(text, separator.as_deref(), most, method == "rsplit")?), 2)
        }
        "strip" | "lstrip" | "rstrip" => {
            let chars = given.text(0, "chars")?;
            let is_cut = |c: char| chars.as_ref().map_or_else(|| words::is_space(c), |chars| chars.contains(c));
            let text = if method == "rstrip" { text } else { text.trim_start_matches(is_cut) };
            (Value::from(if method == "lstrip" { text } else { text.trim_end_matches(is_cut) }), 1)
        }
        "splitlines" => {
            let keeps_ends = given.get(0, "keepends")?.is_some_and(|keeps| keeps.is_true());
            (Value::from(words::lines(text, keeps_ends)), 1)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => (search(text, method, &given)?, 3),
        "startswith" | "endswith" => (Value::from(has_end(text, method == "startswith", &given)?), 3),
        "partition" | "rpartition" => {
            let separator = given.needed(0, "sep")?;
            (Value::from(Tuple::from(partition(text, &separator, method == "rpartition").map(Value::from))), 1)
        }
        "removeprefix" => (Value::from(text.strip_prefix(&given.needed(0, "prefix")?[..]).unwrap_or(text)), 1),
        "removesuffix" => (Value::from(text.strip_suffix(&given.needed(0, "suffix")?[..]).unwrap_or(text)), 1),
        "zfill" | "center" | "ljust" | "rjust" => (Value::from(justified(state, text, method, &given)?), 2),
        "expandtabs" => (Value::from(expanded(state, text, given.number(0, "tabsize")?.unwrap_or(8))?), 1),
        "title" => (Value::from(words::title(text)), 0),
        "swapcase" => (Value::from(words::swapped(text)), 0),
        "casefold" => {
            let folded = text.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase);
            (Value::from(folded.collect::<String>()), 0)
        }
        "isdecimal" => (Value::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())), 0),
        "istitle" => (Value::from(text.chars().any(char::is_alphabetic) && words::title(text) == text), 0),
        "encode" => (Value::from_bytes(text.as_bytes().to_vec()), 2),
        "join" => return only_text(arguments).map(|()| None),
        "format" => return bounded_format(text).map(|()| None),
        _ => return Ok(None),
    };
    given.end(limit)?;
    Ok(Some(value))
}

/// A method of a list or tuple; `None` for one that is not known here.
fn list(value: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "index" => {
            let (item,): (Value,) = from_args(arguments)?;
            let at = value.try_iter()?.position(|other| other == item);
            at.map(|at| Some(Value::from(at))).ok_or_else(|| wrong(format!("`{item}` is not in the list")))
        }
        "copy" => Ok(Some(value.clone())),
        _ => Ok(None),
    }
}

/// The part of a text between the characters `start` and `end`, and the number of characters before it.
fn window<'a>(text: &'a str, given: &Arguments) -> Result<(&'a str, usize), Error> {
    let (start, end) = (given.number(1, "start")?, given.number(2, "end")?);
    if start.is_none() && end.is_none() {
        return Ok((text, 0));
    }
    let length = text.chars().count();
    let place = |at: i64| usize::try_from(if at < 0 { at + length as i64 } else { at }).unwrap_or(0).min(length);
    let (start, end) = (place(start.unwrap_or(0)), place(end.unwrap_or(i64::MAX)));
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    Ok((&text[byte(start)..byte(end.max(start))], start))
}

fn search(text: &str, method: &str, given: &Arguments) -> Result<Value, Error> {
    let part = given.needed(0, "sub")?;
    let (text, before) = window(text, given)?;
    if method == "count" {
        return Ok(Value::from(text.matches(&part[..]).count()));
    }
    let at = if method.starts_with('r') { text.rfind(&part[..]) } else { text.find(&part[..]) };
    match at {
        Some(at) => Ok(Value::from(before + text[..at].chars().count())),
        None if method.ends_with("index") => Err(wrong("substring not found".to_owned())),
        None => Ok(Value::from(-1)),
    }
}

/// Whether a text starts or ends with the first argument, or with one of a list.
fn has_end(text: &str, is_start: bool, given: &Arguments) -> Result<bool, Error> {
    let (text, _) = window(text, given)?;
    let has = |end: &Value| match end.as_str() {
        Some(end) if is_start => Ok(text.starts_with(end)),
        Some(end) => Ok(text.ends_with(end)),
        None => Err(wrong("starts and ends must be text".to_owned())),
    };
    let ends = given.get(0, "prefix")?.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    if ends.kind() != ValueKind::Seq {
        return has(&ends);
    }
    for end in ends.try_iter()? {
        if has(&end)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn partition<'a>(text: &'a str, separator: &'a str, is_last: bool) -> [&'a str; 3] {
    let parts = if is_last { text.rsplit_once(separator) } else { text.split_once(separator) };
    match parts {
        Some((before, behind)) => [before, separator, behind],
        None if is_last => ["", "", text],
        None => [text, "", ""],
    }
}

/// A text with characters around it, so that it has a width.
fn justified(state: &State, text: &str, method: &str, given: &Arguments) -> Result<String, Error> {
    let width = given.number(0, "width")?.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    let fill = given.text(1, "fillchar")?.unwrap_or_else(|| if method == "zfill" { "0" } else { " " }.to_owned());
    if fill.chars().count() != 1 {
        return Err(wrong("the fill character must be one character".to_owned()));
    }
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    state.consume_fuel(missing as u64 / 16)?;
    let filled = |count: usize| fill.repeat(count);
    Ok(match method {
        "ljust" => format!("{text}{}", filled(missing)),
        "rjust" => format!("{}{text}", filled(missing)),
        "zfill" => {
            let digits = text.trim_start_matches(['-', '+']);
            let sign = if text.len() - digits.len() == 1 { &text[..1] } else { "" };
            format!("{sign}{}{}", filled(missing), &text[sign.len()..])
        }
        // Python puts the odd one to the left if the width is odd too.
        _ => {
            let left = missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1);
            format!("{}{text}{}", filled(left), filled(missing - left))
        }
    })
}

/// A text with spaces up to the next multiple of `size` for each tab.
fn expanded(state: &State, text: &str, size: i64) -> Result<String, Error> {
    let size = usize::try_from(size).unwrap_or(0);
    state.consume_fuel(text.matches('\t').count().saturating_mul(size) as u64 / 64)?;
    let (mut expanded, mut column) = (String::new(), 0);
    for c in text.chars() {
        if c == '\t' && size > 0 {
            let spaces = size - column % size;
            expanded.push_str(&" ".repeat(spaces));
            column += spaces;
        } else if c != '\t' {
            expanded.push(c);
            column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
        }
    }
    Ok(expanded)
}

/// Refuses to join what is not text.
fn only_text(arguments: &[Value]) -> Result<(), Error> {
    let (items,): (Value,) = from_args(arguments)?;
    match items.try_iter()?.find(|item| item.as_str().is_none()) {
        Some(item) => Err(wrong(format!("`join` takes text only, not a value that is {}", item.kind()))),
        None => Ok(()),
    }
}

/// Refuses wide fields, because they are made before the template's limits see them.
fn bounded_format(text: &str) -> Result<(), Error> {
    match text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > MAX_FORMAT_DIGITS) {
        true => Err(wrong(format!("`format` takes numbers of at most {MAX_FORMAT_DIGITS} digits"))),
        false => Ok(()),
    }
}

fn wrong(words: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, words)
}
