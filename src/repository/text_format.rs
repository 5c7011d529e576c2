//! `config.pbtxt`: protobuf text format as users and template tools write it.
//!
//! `prost_reflect` does the parsing. A pre-pass rewrites what it does not accept: message lists without a colon (`input [ {`) and
//! unfilled template variables (`max_batch_size: ${batch}`), which mean "unset".

use prost_reflect::{DynamicMessage, Value};

use crate::proto::{self, DataType, ModelConfig};
use crate::syntax::{self, SyntaxError};

/// The value of an unfilled `max_batch_size: ${…}`. Clients of such templates send a batch dimension, so it must not be 0.
const DEFAULT_MAX_BATCH_SIZE: i32 = 64;

/// A configuration, and the names of its unfilled template variables.
pub(crate) struct Parsed {
    pub config: ModelConfig,
    pub unfilled: Vec<String>,
}

/// Parses the text of a `config.pbtxt`.
///
/// # Errors
/// If the text does not follow the format or the schema. The error has line, column and advice.
pub(crate) fn parse(text: &str) -> Result<Parsed, SyntaxError> {
    let prepared = prepare(text);
    let mut message = DynamicMessage::parse_text_format(proto::model_config_descriptor(), &prepared.text)
        .map_err(|error| syntax::explain(text, &prepared.inserted, &error))?;
    clear_unfilled(&mut message);
    let mut config: ModelConfig = message.transcode_to().expect("the descriptor and the type come from one proto");
    if !prepared.unfilled.is_empty() {
        default_data_types(&mut config);
        default_backend(&mut config);
    }
    if prepared.max_batch_size_is_unset {
        config.max_batch_size = DEFAULT_MAX_BATCH_SIZE;
    }
    Ok(Parsed { config, unfilled: prepared.unfilled })
}

/// The text for the parser, and the offsets of bytes that the user did not write.
struct Prepared {
    text: String,
    inserted: Vec<usize>,
    unfilled: Vec<String>,
    max_batch_size_is_unset: bool,
}

fn prepare(text: &str) -> Prepared {
    let mut scanner = Scanner { text, at: 0, out: Vec::with_capacity(text.len() + 16), ..Scanner::default() };
    scanner.run();
    let out = String::from_utf8(scanner.out).expect("only whole ASCII characters are replaced");
    let Scanner { inserted, unfilled, max_batch_size_is_unset, .. } = scanner;
    Prepared { text: out, inserted, unfilled, max_batch_size_is_unset }
}

/// The previous token, not counting whitespace and comments.
#[derive(Default, Clone, Copy, PartialEq)]
enum Last {
    #[default]
    Other,
    /// A name that begins at this offset of the output.
    Name(usize),
    /// The colon after a name that begins at this offset of the output.
    Colon(usize),
    /// An opening `[`.
    Opening,
    /// A comma or semicolon at this offset of the output.
    Comma(usize),
}

#[derive(Default)]
struct Scanner<'a> {
    text: &'a str,
    at: usize,
    out: Vec<u8>,
    inserted: Vec<usize>,
    unfilled: Vec<String>,
    max_batch_size_is_unset: bool,
    last: Last,
    /// The previous token was a blanked value; the separator after it is blanked too.
    drop_separator: bool,
}

impl Scanner<'_> {
    fn run(&mut self) {
        while let Some(&byte) = self.text.as_bytes().get(self.at) {
            match byte {
                b'#' => self.copy_while(|byte| byte != b'\n'),
                b'"' | b'\'' => self.string(byte),
                b'$' if self.rest().starts_with("${") => self.variable(),
                b'[' => self.list(),
                b',' | b';' => self.separator(byte),
                byte if byte.is_ascii_whitespace() => self.copy_while(|byte| byte.is_ascii_whitespace()),
                byte if byte.is_ascii_alphabetic() || byte == b'_' => self.name(),
                byte => self.other(byte),
            }
        }
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn copy_while(&mut self, keep: impl Fn(u8) -> bool) {
        let bytes = &self.text.as_bytes()[self.at..];
        let length = bytes.iter().position(|&byte| !keep(byte)).unwrap_or(bytes.len());
        self.out.extend_from_slice(&bytes[..length]);
        self.at += length;
    }

    fn token(&mut self, last: Last) {
        self.last = last;
        self.drop_separator = false;
    }

    fn string(&mut self, quote: u8) {
        let bytes = self.text.as_bytes();
        let mut end = self.at + 1;
        while end < bytes.len() && bytes[end] != quote && bytes[end] != b'\n' {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        let end = (end + 1).min(bytes.len());
        let literal = &bytes[self.at..end];
        self.out.extend_from_slice(literal);
        self.unfilled.extend(variables(&String::from_utf8_lossy(literal)));
        self.at = end;
        self.token(Last::Other);
    }

    fn name(&mut self) {
        let start = self.out.len();
        self.copy_while(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        self.token(Last::Name(start));
    }

    fn other(&mut self, byte: u8) {
        let last = match (byte, self.last) {
            (b':', Last::Name(start)) => Last::Colon(start),
            _ => Last::Other,
        };
        self.out.push(byte);
        self.at += 1;
        self.token(last);
    }

    fn separator(&mut self, byte: u8) {
        self.last = Last::Comma(self.out.len());
        self.out.push(if self.drop_separator { b' ' } else { byte });
        self.drop_separator = false;
        self.at += 1;
    }

    /// Inserts the colon that `name [` lacks. It replaces a space if there is one, so that columns do not change.
    fn list(&mut self) {
        if matches!(self.last, Last::Name(_)) {
            match self.out.last_mut() {
                Some(blank @ (b' ' | b'\t')) => *blank = b':',
                _ => {
                    self.inserted.push(self.out.len());
                    self.out.push(b':');
                }
            }
        }
        self.out.push(b'[');
        self.at += 1;
        self.token(Last::Opening);
    }

    /// Blanks a bare `${variable}` with its field name, or with one comma if it is a list element.
    fn variable(&mut self) {
        let bytes = self.text.as_bytes();
        let mut end = self.at;
        while self.text[end..].starts_with("${") {
            match self.text[end..].find(['}', '\n']) {
                Some(length) if bytes[end + length] == b'}' => end += length + 1,
                _ => return self.other(b'$'),
            }
            end += bytes[end..].iter().take_while(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(byte)).count();
        }
        let variable = &self.text[self.at..end];
        self.unfilled.extend(variables(variable));
        self.out.resize(self.out.len() + variable.len(), b' ');
        self.at = end;
        match self.last {
            Last::Name(start) | Last::Colon(start) => {
                self.max_batch_size_is_unset |= self.out[start..].starts_with(b"max_batch_size");
                blank(&mut self.out[start..]);
            }
            Last::Comma(at) => self.out[at] = b' ',
            Last::Opening | Last::Other => {}
        }
        self.drop_separator = !matches!(self.last, Last::Comma(_));
        self.last = if self.last == Last::Opening { Last::Opening } else { Last::Other };
    }
}

/// Replaces everything except line ends with spaces.
fn blank(bytes: &mut [u8]) {
    bytes.iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
}

/// The names of the `${…}` in `text`.
fn variables(text: &str) -> Vec<String> {
    let parts = text.split("${").skip(1);
    parts.filter_map(|part| part.split_once('}')).map(|(name, _)| name.to_owned()).collect()
}

/// Clears every string that contains an unfilled variable, and removes list elements and map entries that are empty after that.
/// Returns true if it cleared anything.
fn clear_unfilled(message: &mut DynamicMessage) -> bool {
    let mut cleared = false;
    for (_, value) in message.fields_mut() {
        match value {
            Value::List(items) => items.retain_mut(|item| !clear_value(item)),
            Value::Map(entries) => entries.retain(|_, entry| !clear_value(entry)),
            value => cleared |= clear_value(value),
        }
    }
    cleared
}

/// Clears unfilled variables in `value`. Returns true if it contained one and is empty now.
fn clear_value(value: &mut Value) -> bool {
    match value {
        Value::String(text) if !variables(text).is_empty() => {
            text.clear();
            true
        }
        Value::Message(message) => clear_unfilled(message) && message.fields().next().is_none(),
        _ => false,
    }
}

/// Sets unfilled data types to FP32. Templates leave the types of some optional tensors to be filled in.
fn default_data_types(config: &mut ModelConfig) {
    let inputs = config.input.iter_mut().map(|input| &mut input.data_type);
    let outputs = config.output.iter_mut().map(|output| &mut output.data_type);
    for data_type in inputs.chain(outputs).filter(|data_type| **data_type == DataType::TypeInvalid as i32) {
        *data_type = DataType::TypeFp32 as i32;
    }
}

/// Sets the backend of a model with `input_ids` and `output_ids`: TensorRT-LLM's templates have `backend: "${triton_backend}"`.
fn default_backend(config: &mut ModelConfig) {
    let takes_ids = config.input.iter().any(|input| input.name == "input_ids");
    let gives_ids = config.output.iter().any(|output| output.name == "output_ids");
    if config.backend.is_empty() && config.platform.is_empty() && takes_ids && gives_ids {
        "tensorrtllm".clone_into(&mut config.backend);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_text_gives_an_error_within_it_and_never_panics() {
        let good = include_str!("tests/configs/tensorrt_llm.pbtxt");
        let scraps = ["${", "}", "[", "]", "\"", "'", "\\", ",", ":", "#", "é", "\n", "${a}", "\0", "-", "9"];
        let offsets: Vec<usize> = good.char_indices().map(|(offset, _)| offset).collect();
        let mut num_errors = 0;
        for (index, &offset) in offsets.iter().enumerate() {
            let scrap = scraps[index % scraps.len()];
            for text in [format!("{}{scrap}{}", &good[..offset], &good[offset..]), good[..offset].to_owned()] {
                if let Err(error) = parse(&text) {
                    num_errors += 1;
                    assert!((1..=text.lines().count().max(1)).contains(&error.line), "{error:?} in\n{text}");
                }
            }
        }
        assert!(num_errors > offsets.len(), "most of these are wrong");
    }

    #[test]
    fn plain_text_format_is_not_changed() {
        let text = "name: \"a [ $ # \" # ${x} in a comment\ninput: [ { dims: [ -1 ] } ]\n";
        let prepared = prepare(text);
        assert_eq!(prepared.text, text);
        assert!(prepared.inserted.is_empty() && prepared.unfilled.is_empty());
    }
}
