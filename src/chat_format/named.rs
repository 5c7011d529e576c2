//! Calls as a name in plain text and the arguments in JSON.

use crate::ToolSchema;
use crate::arguments::Arguments;
use crate::calls::{Body, Deltas, find};
use crate::format::Named;
use crate::json::Step;
use crate::marker::MarkerScan;
use crate::object::ObjectBody;

/// The longest name or id, in bytes.
const MAX_NAME: usize = 256;

/// Reads a name, a separator and a JSON object.
pub(crate) struct NamedBody {
    syntax: Named,
    at: At,
    id: Option<String>,
}

enum At {
    Name {
        scan: MarkerScan,
        text: String,
    },
    Id {
        scan: MarkerScan,
        text: String,
        name: String,
    },
    Arguments(Arguments),
    /// A list of objects in place of a name.
    List(ObjectBody),
    End,
}

impl NamedBody {
    pub(crate) fn new(syntax: Named) -> Self {
        Self { syntax, at: At::Name { scan: MarkerScan::default(), text: String::new() }, id: None }
    }

    /// The arguments of a call whose name was read already.
    pub(crate) fn arguments(syntax: Named, deltas: &mut Deltas, name: &str) -> Self {
        deltas.start(None, name.to_owned());
        Self { syntax, at: At::Arguments(Arguments::new()), id: None }
    }

    fn named(&mut self, text: &str, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        let text = text.trim();
        let mut name = text.strip_prefix(self.syntax.prefix.as_str()).unwrap_or(text).trim();
        if self.syntax.numbered {
            self.id = Some(text.to_owned());
            let digits = name.rsplit_once(':').filter(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
            name = digits.map_or(name, |(name, _)| name);
        }
        if find(tools, name).is_none() {
            return Step::Broken;
        }
        deltas.start(self.id.take(), name.to_owned());
        self.at = At::Arguments(Arguments::new());
        Step::More
    }

    fn name(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        let At::Name { scan, text } = &mut self.at else { return Step::Broken };
        if self.syntax.or_list && c == '[' && text.trim().is_empty() && scan.held().is_empty() {
            let mut list = ObjectBody::new("name", "arguments");
            let step = list.push(c, tools, deltas);
            self.at = At::List(list);
            return step;
        }
        if c == '{' && scan.held().is_empty() {
            let text = std::mem::take(text);
            return match self.named(&text, tools, deltas) {
                Step::More => self.push(c, tools, deltas),
                step => step,
            };
        }
        let mut markers = vec![self.syntax.separator.as_str()];
        markers.extend(self.syntax.id.as_deref());
        match scan.push(c, &markers, text) {
            Some(0) => {
                let text = std::mem::take(text);
                self.named(&text, tools, deltas)
            }
            Some(_) => {
                let name = std::mem::take(text);
                self.at = At::Id { scan: MarkerScan::default(), text: String::new(), name };
                Step::More
            }
            None if text.len() > MAX_NAME => Step::Broken,
            None => Step::More,
        }
    }

    fn id(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        let At::Id { scan, text, name } = &mut self.at else { return Step::Broken };
        match scan.push(c, &[self.syntax.separator.as_str()], text) {
            Some(_) => {
                self.id = Some(text.trim().to_owned()).filter(|id| !id.is_empty());
                let name = std::mem::take(name);
                self.named(&name, tools, deltas)
            }
            None if text.len() > MAX_NAME => Step::Broken,
            None => Step::More,
        }
    }
}

impl Body for NamedBody {
    fn push(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        match &mut self.at {
            At::Name { .. } => self.name(c, tools, deltas),
            At::Id { .. } => self.id(c, tools, deltas),
            At::List(list) => list.push(c, tools, deltas),
            At::End => Step::Before,
            At::Arguments(arguments) => {
                let mut text = String::new();
                let step = arguments.push(c, &mut text);
                deltas.arguments(&text);
                deltas.committed |= step != Step::Broken && arguments.is_certain();
                if step == Step::Done {
                    self.at = At::End;
                }
                step
            }
        }
    }

    fn close(&mut self, deltas: &mut Deltas) {
        match &mut self.at {
            At::Arguments(arguments) => {
                let mut text = String::new();
                arguments.close(&mut text);
                deltas.arguments(&text);
            }
            At::List(list) => list.close(deltas),
            _ => {}
        }
    }
}
