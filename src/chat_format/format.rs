//! The description of how one family of models writes a turn.

use crate::TurnStart;

/// How one family of models writes reasoning, content and tool calls.
///
/// A stream parser and a grammar that constrains calls come from the same description, so that what the grammar
/// lets through is what the parser reads.
#[derive(Clone, Debug)]
pub struct ChatFormat {
    pub(crate) name: String,
    pub(crate) reasoning: Option<Reasoning>,
    pub(crate) calls: Option<Calls>,
    /// The turn is a sequence of messages with headers (Harmony).
    pub(crate) messages: bool,
    /// What the prompt ends with before the turn of the assistant, such as `<|im_start|>assistant`.
    pub(crate) turn: Vec<String>,
    /// Markers of content that are dropped.
    pub(crate) dropped: Vec<String>,
    /// See [`ChatFormat::special_tokens`].
    pub(crate) special: Vec<String>,
}

/// Where reasoning stands.
#[derive(Clone, Debug)]
pub(crate) struct Reasoning {
    pub(crate) open: String,
    pub(crate) close: String,
    /// A turn begins with reasoning although no marker opens it.
    pub(crate) implied: bool,
    /// The marker opens reasoning behind content too: it is never a part of a text.
    pub(crate) anywhere: bool,
}

/// How calls are written.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    /// The markers around all calls.
    pub(crate) wrap: Option<(String, String)>,
    /// The markers that open a call; the first is the one that the grammar writes.
    pub(crate) open: Vec<String>,
    /// The character that opens a call at the start of the content.
    pub(crate) bare: Option<char>,
    /// The marker that closes a call.
    pub(crate) close: Option<String>,
    /// What stands between the text of a call and `close`, and is dropped there.
    pub(crate) suffix: Option<String>,
    /// Characters that separate calls.
    pub(crate) separators: String,
    /// A call ends reasoning: its markers are never a part of a text.
    pub(crate) end_reasoning: bool,
    pub(crate) syntax: Syntax,
}

/// How the name and the arguments of a call are written.
#[derive(Clone, Debug)]
pub(crate) enum Syntax {
    /// A JSON object with the name and the arguments under these keys.
    Object {
        name: String,
        arguments: String,
        /// The key of a number in a text, which the grammar writes first.
        id: Option<String>,
        /// If set, the grammar writes a list of objects, with these texts before, between and behind them.
        list: Option<[&'static str; 3]>,
    },
    /// A list of JSON objects with one key each: the name, whose value are the arguments.
    Keyed,
    /// The name, then the arguments in JSON.
    Named(Named),
    /// Each parameter between markers.
    Parameters(Parameters),
    /// Python calls, as a list or in lines.
    Python { lines: bool },
    /// `call:name{key:value}` with strings between these markers.
    Loose { quote: String },
}

/// A list of objects as JSON is usually written.
pub(crate) const LIST: [&str; 3] = ["[", ", ", "]"];

/// Markers of a name that is followed by JSON.
#[derive(Clone, Debug, Default)]
pub(crate) struct Named {
    /// What the grammar writes before the name, and the parser strips.
    pub(crate) prefix: String,
    /// Between the name and the arguments, without white space around it.
    pub(crate) separator: String,
    /// Between the name and an id that the model gives.
    pub(crate) id: Option<String>,
    /// `:INDEX` follows the name, and prefix, name and index are the call's id.
    pub(crate) numbered: bool,
    /// A JSON list of objects may stand in place of the name.
    pub(crate) or_list: bool,
    /// White space that the grammar writes before and behind the separator.
    pub(crate) space: &'static str,
}

/// Markers of parameters; white space around them is free.
#[derive(Clone, Debug)]
pub(crate) struct Parameters {
    /// Around the name of the tool: `<function=` and `>`; empty where the name ends with the line.
    pub(crate) name: (String, String),
    /// Around the name of a parameter.
    pub(crate) key: (String, String),
    /// Around the value of a parameter; an opening marker follows the name.
    pub(crate) value: (String, String),
    /// A line break stands on both sides of a value.
    pub(crate) lines: bool,
    /// The end of the parameters, if the call has a marker for it.
    pub(crate) end: String,
}

impl ChatFormat {
    /// The name of the family, or `response_template` for a format that was read from a checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether turns have reasoning.
    pub fn has_reasoning(&self) -> bool {
        self.reasoning.is_some() || self.messages
    }

    /// The markers that open and close reasoning; `None` where it has none, or whole messages are reasoning.
    pub fn reasoning_markers(&self) -> Option<(&str, &str)> {
        self.reasoning.as_ref().map(|reasoning| (reasoning.open.as_str(), reasoning.close.as_str()))
    }

    /// Whether turns have tool calls.
    pub fn has_calls(&self) -> bool {
        self.calls.is_some() || self.messages
    }

    /// The markers that the parser must see. A tokenizer that marks some of them special must not leave them out.
    pub fn special_tokens(&self) -> &[String] {
        &self.special
    }

    /// Fills in the markers of the description.
    pub(crate) fn with_markers(mut self) -> Self {
        self.special = self.markers();
        self
    }

    fn markers(&self) -> Vec<String> {
        if self.messages {
            return ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
                .map(str::to_owned)
                .to_vec();
        }
        let mut markers: Vec<String> = Vec::new();
        if let Some(reasoning) = &self.reasoning {
            markers.extend([reasoning.open.clone(), reasoning.close.clone()]);
            // A token and a word, such as `<|channel>thought`.
            let token = reasoning.open.split_inclusive('>').next().filter(|token| *token != reasoning.open);
            markers.extend(token.map(str::to_owned));
        }
        if let Some(calls) = &self.calls {
            markers.extend(calls.wrap.iter().flat_map(|(open, close)| [open.clone(), close.clone()]));
            markers.extend(calls.open.iter().cloned());
            markers.extend(calls.close.iter().cloned());
            match &calls.syntax {
                Syntax::Named(named) => {
                    markers.extend(named.prefix.find('<').map(|at| named.prefix[at..].to_owned()));
                    markers.push(named.separator.clone());
                    markers.extend(named.id.clone());
                }
                Syntax::Parameters(parameters) => {
                    let pairs = [&parameters.name, &parameters.key, &parameters.value];
                    markers.extend(pairs.into_iter().flat_map(|(open, close)| [open.clone(), close.clone()]));
                    markers.push(parameters.end.clone());
                }
                Syntax::Loose { quote } => markers.push(quote.clone()),
                Syntax::Object { .. } | Syntax::Keyed | Syntax::Python { .. } => {}
            }
        }
        markers.extend(self.dropped.iter().cloned());
        markers.retain(|marker| !marker.is_empty());
        markers
    }

    /// How a turn begins behind a prompt that ends with `prompt_tail` (some hundred characters of its rendered text).
    pub fn turn_start(&self, prompt_tail: &str) -> TurnStart {
        if self.messages {
            return crate::harmony::turn_start(prompt_tail);
        }
        let Some(reasoning) = &self.reasoning else { return TurnStart::Content };
        let turn = self.turn.iter().filter_map(|turn| Some(prompt_tail.rfind(turn)? + turn.len())).max();
        let (open, close) = match turn {
            Some(turn) => {
                let text = &prompt_tail[turn..];
                (text.rfind(&reasoning.open), text.rfind(&reasoning.close))
            }
            // Markers count only at the very end: further up they may stand in an earlier turn.
            None => {
                let text = prompt_tail.trim_end();
                (text.ends_with(&reasoning.open).then_some(0), text.ends_with(&reasoning.close).then_some(0))
            }
        };
        match (open, close) {
            (_, Some(close)) if open.is_none_or(|open| open <= close) => TurnStart::Content,
            (Some(_), _) => TurnStart::Thinking,
            _ => TurnStart::Fresh,
        }
    }
}
