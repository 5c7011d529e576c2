//! The filter `tojson`: `json.dumps` of Python with `ensure_ascii=False`, as in transformers.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::python;

/// Widest indent.
const MAX_INDENT: usize = 64;

/// How a value is written.
struct Style {
    ensure_ascii: bool,
    /// `None` for one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `tojson(value, ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub(super) fn to_json(state: &State, value: Value, options: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let style = Style::of(&options, &named)?;
    let mut writer = Writer { state, style, text: String::new() };
    writer.value(&value, 0)?;
    Ok(Value::from(writer.text))
}

/// The JSON of a client's value, as `tojson` without options writes it.
pub(super) fn python_text(value: &serde_json::Value) -> String {
    let environment = Environment::empty();
    let style = Style {
        ensure_ascii: false,
        indent: None,
        item_separator: ", ".to_owned(),
        key_separator: ": ".to_owned(),
        sort_keys: false,
    };
    let mut writer = Writer { state: &environment.empty_state(), style, text: String::new() };
    writer
        .value(&Value::from(Serde(value)), 0)
        .expect("JSON of a client is not deep, and without fuel nothing runs out");
    writer.text
}

impl Style {
    fn of(positional: &[Value], named: &Kwargs) -> Result<Self, Error> {
        let option = |at: usize, name: &str| match positional.get(at) {
            Some(value) => Ok(Some(value.clone())),
            None => named.get::<Option<Value>>(name),
        };
        let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let ensure_ascii = is_true(option(0, "ensure_ascii")?);
        let indent = option(1, "indent")?.filter(|indent| !indent.is_none()).map(indent).transpose()?;
        let separators = option(2, "separators")?.filter(|separators| !separators.is_none());
        let sort_keys = is_true(option(3, "sort_keys")?);
        named.assert_all_used()?;
        let (item_separator, key_separator) = match separators {
            Some(separators) => self::separators(&separators)?,
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
        };
        Ok(Self { ensure_ascii, indent, item_separator, key_separator, sort_keys })
    }
}

/// The text of one level of indent, given as a number of spaces or as text.
fn indent(value: Value) -> Result<String, Error> {
    let text = match value.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(i64::try_from(value)?).unwrap_or(0).min(MAX_INDENT + 1)),
    };
    if text.len() > MAX_INDENT {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("`tojson` has an indent above {MAX_INDENT}")));
    }
    Ok(text)
}

fn separators(value: &Value) -> Result<(String, String), Error> {
    let both: Vec<Value> = value.try_iter()?.take(3).collect();
    match &both[..] {
        [item, key] if item.as_str().is_some() && key.as_str().is_some() => Ok((item.to_string(), key.to_string())),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "`separators` of `tojson` must be two strings")),
    }
}

/// JSON while it is written. Every step and byte costs the template's fuel.
struct Writer<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    style: Style,
    text: String,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        python::step(self.state, depth)?;
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.container(['[', ']'], items, depth)?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    items.push((Some(key_text(&key)?), item));
                }
                if self.style.sort_keys {
                    items.sort_by(|(left, _), (right, _)| left.cmp(right));
                }
                self.container(['{', '}'], items, depth)?;
            }
            kind => {
                let words = format!("`tojson` cannot write a value that is {kind}");
                return Err(Error::new(ErrorKind::BadSerialization, words));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        items: Vec<(Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.text.push(open);
        let is_empty = items.is_empty();
        for (at, (key, item)) in items.into_iter().enumerate() {
            if at > 0 {
                self.text.push_str(&self.style.item_separator);
            }
            self.line(depth + 1)?;
            if let Some(key) = key {
                self.string(&key)?;
                self.text.push_str(&self.style.key_separator);
            }
            self.value(&item, depth + 1)?;
        }
        if !is_empty {
            self.line(depth)?;
        }
        self.text.push(close);
        Ok(())
    }

    /// Starts a line if the value is written in lines.
    fn line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.style.indent else { return Ok(()) };
        self.state.consume_fuel((indent.len() * depth) as u64 / 64)?;
        self.text.push('\n');
        (0..depth).for_each(|_| self.text.push_str(indent));
        Ok(())
    }

    fn string(&mut self, string: &str) -> Result<(), Error> {
        self.state.consume_fuel(string.len() as u64 / 16)?;
        self.text.push('"');
        for c in string.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.text, "\\u{unit:04x}").expect("a string takes everything");
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
        Ok(())
    }
}

/// A number as Python writes it in JSON.
fn number(value: &Value) -> String {
    match python::number(value).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        number => number.to_owned(),
    }
}

/// A dictionary's key as text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(Error::new(ErrorKind::BadSerialization, format!("`tojson` cannot write a key that is {kind}"))),
    }
}
