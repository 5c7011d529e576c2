//! Calls as JSON: an object with the name and the arguments, or a list of such objects. The name may be the only key.

use crate::ToolSchema;
use crate::arguments::Arguments;
use crate::calls::{Body, Deltas, find};
use crate::json::{JsonStream, Step};

/// The longest name or key, in bytes.
const MAX_KEY: usize = 1024;

/// Reads `{"name": …, "arguments": {…}}` or a list of them. `parameters` means `arguments`; other keys are skipped.
pub(crate) struct ObjectBody {
    at: At,
    in_list: bool,
    call: Call,
    name: String,
    arguments: String,
    /// The key of the arguments is the name.
    is_keyed: bool,
}

enum At {
    Begin,
    /// An object must begin; a list may end here before its first item.
    Item,
    /// A key, or the end of the object.
    Key,
    Colon(Field),
    Name(Scratch),
    Arguments(Arguments),
    Other(JsonStream),
    AfterField,
    AfterItem,
    KeyText(Scratch),
}

#[derive(Clone, Copy)]
enum Field {
    Name,
    Arguments,
    Other,
}

/// One object.
#[derive(Default)]
struct Call {
    started: bool,
    has_arguments: bool,
    /// Arguments that came before the name.
    held: String,
}

/// A JSON string that is gathered before it is read.
struct Scratch {
    json: JsonStream,
    text: String,
}

impl Scratch {
    fn new() -> Self {
        Self { json: JsonStream::new(), text: String::new() }
    }

    fn push(&mut self, c: char) -> Step {
        if self.text.len() > MAX_KEY || self.text.is_empty() && c != '"' && !c.is_ascii_whitespace() {
            return Step::Broken;
        }
        self.json.push(c, &mut self.text)
    }

    fn value(&self) -> String {
        serde_json::from_str(&self.text).unwrap_or_default()
    }
}

impl ObjectBody {
    /// The keys of the name and the arguments.
    pub(crate) fn new(name: &str, arguments: &str) -> Self {
        let (name, arguments) = (name.to_owned(), arguments.to_owned());
        Self { at: At::Begin, in_list: false, call: Call::default(), name, arguments, is_keyed: false }
    }

    /// Objects whose only key is the name.
    pub(crate) fn keyed() -> Self {
        Self { is_keyed: true, ..Self::new("", "") }
    }

    fn key(&mut self, c: char) -> Step {
        match c {
            '"' => {
                let mut scratch = Scratch::new();
                scratch.push(c);
                self.at = At::KeyText(scratch);
                Step::More
            }
            _ => Step::Broken,
        }
    }

    fn field(&self, key: &str) -> Field {
        match key {
            _ if key == self.name && !self.call.started => Field::Name,
            _ if self.call.has_arguments => Field::Other,
            _ if key == self.arguments || matches!(key, "arguments" | "parameters") => Field::Arguments,
            _ => Field::Other,
        }
    }

    /// The object ends.
    fn end_item(&mut self, deltas: &mut Deltas) -> Step {
        if !self.call.started {
            return Step::Broken;
        }
        if !self.call.has_arguments {
            deltas.arguments("{}");
        }
        self.call = Call::default();
        self.at = At::AfterItem;
        if self.in_list { Step::More } else { Step::Done }
    }

    /// The name of the call, which is the key of its arguments.
    fn begin(&mut self, name: String, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        if self.call.started || find(tools, &name).is_none() {
            return Step::Broken;
        }
        deltas.start(None, name);
        self.call.started = true;
        self.at = At::Colon(Field::Arguments);
        Step::More
    }

    fn value(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        let step = match &mut self.at {
            At::KeyText(scratch) => {
                let step = scratch.push(c);
                if step == Step::Done {
                    let key = scratch.value();
                    if self.is_keyed {
                        return self.begin(key, tools, deltas);
                    }
                    self.at = At::Colon(self.field(&key));
                    return Step::More;
                }
                return step;
            }
            At::Name(scratch) => {
                let step = scratch.push(c);
                if step == Step::Done {
                    let name = scratch.value();
                    if find(tools, &name).is_none() {
                        return Step::Broken;
                    }
                    deltas.start(None, name);
                    self.call.started = true;
                    deltas.arguments(&std::mem::take(&mut self.call.held));
                }
                step
            }
            At::Arguments(arguments) => {
                let mut text = String::new();
                let step = arguments.push(c, &mut text);
                match self.call.started {
                    true => deltas.arguments(&text),
                    false => self.call.held.push_str(&text),
                }
                deltas.committed &= arguments.is_certain() && step != Step::Broken;
                step
            }
            At::Other(json) => json.push(c, &mut String::new()),
            _ => Step::Broken,
        };
        match step {
            Step::Done => self.at = At::AfterField,
            Step::Before => {
                self.at = At::AfterField;
                return self.push(c, tools, deltas);
            }
            Step::More | Step::Broken => return step,
        }
        Step::More
    }
}

impl Body for ObjectBody {
    fn push(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        deltas.committed |= self.call.started;
        match (&self.at, c) {
            (At::Name(_) | At::Arguments(_) | At::Other(_) | At::KeyText(_), _) => return self.value(c, tools, deltas),
            (
                At::Begin | At::Item | At::Key | At::Colon(_) | At::AfterField | At::AfterItem,
                ' ' | '\t' | '\n' | '\r',
            ) => {}
            (At::Begin, '[') => {
                self.in_list = true;
                self.at = At::Item;
            }
            (At::Begin | At::Item, '{') => self.at = At::Key,
            (At::Colon(field), ':') => {
                self.at = match field {
                    Field::Name => At::Name(Scratch::new()),
                    Field::Arguments => {
                        self.call.has_arguments = true;
                        At::Arguments(Arguments::new())
                    }
                    Field::Other => At::Other(JsonStream::new()),
                }
            }
            (At::Key | At::AfterField, '}') => return self.end_item(deltas),
            (At::Key, _) => return self.key(c),
            (At::AfterField, ',') => self.at = At::Key,
            (At::AfterItem, ',') => {
                deltas.committed = true;
                self.at = At::Item;
            }
            (At::AfterItem, ']') => {
                deltas.committed = true;
                return Step::Done;
            }
            _ => return Step::Broken,
        }
        Step::More
    }

    fn close(&mut self, deltas: &mut Deltas) {
        if !self.call.started {
            return;
        }
        let mut text = String::new();
        match &mut self.at {
            At::Arguments(arguments) => arguments.close(&mut text),
            _ if !self.call.has_arguments => text.push_str("{}"),
            _ => {}
        }
        deltas.arguments(&text);
        self.call = Call::default();
    }
}
