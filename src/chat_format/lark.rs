//! Rules in llguidance's variant of Lark.

use serde_json::Value;

use crate::ToolGrammar;

/// The rules of a grammar. Terminals never contain special tokens, so text in them ends where such a token stands.
pub(crate) struct Lark<'a> {
    rules: Vec<String>,
    is_special: &'a dyn Fn(&str) -> bool,
    unnamed: Vec<String>,
}

impl<'a> Lark<'a> {
    pub(crate) fn new(is_special: &'a dyn Fn(&str) -> bool) -> Self {
        Self { rules: vec!["SPACE: /[ \\t\\r\\n]{0,8}/".into()], is_special, unnamed: Vec::new() }
    }

    pub(crate) fn is_special(&self, text: &str) -> bool {
        (self.is_special)(text)
    }

    /// Adds a rule; its name.
    pub(crate) fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.rules.len());
        self.rules.push(format!("{name}{attributes}: {body}"));
        name
    }

    /// The name that the next rule will have.
    pub(crate) fn next_rule(&self) -> String {
        format!("r{}", self.rules.len())
    }

    /// Adds a terminal; its name.
    pub(crate) fn terminal(&mut self, body: &str) -> String {
        let name = format!("T{}", self.rules.len());
        self.rules.push(format!("{name}: {body}"));
        name
    }

    /// The text, which has no special token.
    pub(crate) fn literal(&self, text: &str) -> String {
        if text.is_empty() { String::new() } else { Value::from(text).to_string() }
    }

    /// A marker, as a special token where it is one.
    pub(crate) fn token(&mut self, text: &str) -> String {
        if !self.is_special(text) {
            return self.literal(text);
        }
        let inner = text.strip_prefix('<').and_then(|text| text.strip_suffix('>'));
        let named =
            |inner: &str| !inner.starts_with('[') && !inner.contains(|c: char| c.is_whitespace() || "<>".contains(c));
        if inner.is_some_and(|inner| !inner.is_empty() && named(inner)) {
            return text.to_owned();
        }
        let index = self.unnamed.iter().position(|name| name == text).unwrap_or(self.unnamed.len());
        if index == self.unnamed.len() {
            self.unnamed.push(text.to_owned());
            self.rules.push(ToolGrammar::unnamed_rule(index));
        }
        format!("special-{index}")
    }

    /// Text that may contain markers such as `<｜tool▁sep｜>` in its midst.
    pub(crate) fn texts(&mut self, text: &str) -> String {
        if text.is_empty() || self.is_special(text) {
            return self.token(text);
        }
        let marks: Vec<_> = text.match_indices('<').map(|(index, _)| index).collect();
        for start in marks {
            let ends = text[start..].match_indices('>').map(|(index, _)| start + index + 1);
            if let Some(end) = ends.into_iter().find(|&end| self.is_special(&text[start..end])) {
                let (before, after) = (self.literal(&text[..start]), self.texts(&text[end..]));
                return format!("{before} {} {after}", self.token(&text[start..end]));
            }
        }
        self.literal(text)
    }

    /// A value of the schema.
    pub(crate) fn json(&self, schema: &Value) -> String {
        format!("%json {schema}")
    }

    /// Free text that does not begin with `not`.
    pub(crate) fn text(&mut self, not: Option<&str>) -> String {
        let body = match not {
            Some(not) => format!("/(?s:.*)/ & ~/\\s*{}(?s:.*)/", regex(not)),
            None => "/(?s:.*)/".to_owned(),
        };
        let terminal = self.terminal(&body);
        self.rule("", &terminal)
    }

    /// Free text up to the end of `marker`, that does not begin with `not`.
    pub(crate) fn text_to(&mut self, marker: &str, not: Option<&str>) -> String {
        if self.is_special(marker) {
            let (text, marker) = (self.text(not), self.token(marker));
            return self.rule("", &format!("{text} {marker}"));
        }
        let body = match not {
            Some(not) => format!("/(?s:.*)/ & ~/\\s*{}(?s:.*)/", regex(not)),
            None => "/(?s:.*)/".to_owned(),
        };
        let (terminal, marker) = (self.terminal(&body), self.literal(marker));
        self.rule("[lazy]", &format!("{terminal} {marker}"))
    }

    /// Free text without `marker`, up to `before` and the marker.
    pub(crate) fn text_without(&mut self, marker: &str, before: &str) -> String {
        let text = self.terminal(&format!("/(?s:.*)/ & ~/(?s:.*){}(?s:.*)/", regex(marker)));
        let end = self.literal(&format!("{before}{marker}"));
        self.rule("[lazy]", &format!("{text} {end}"))
    }

    /// Text from `open` to the first `close` behind it.
    pub(crate) fn text_between(&mut self, open: &str, close: &str) -> String {
        if self.is_special(close) {
            let (open, close) = (self.literal(open), self.token(close));
            let opened = self.terminal(&format!("{open} /(?s:.*)/"));
            return self.rule("", &format!("{opened} {close}"));
        }
        let body = format!("{} /(?s:.*)/ {}", self.literal(open), self.literal(close));
        self.rule("[lazy]", &body)
    }

    /// The whole grammar.
    pub(crate) fn grammar(self, start: &str, starts_after: Option<String>) -> ToolGrammar {
        let lark = format!("%llguidance {{}}\nstart: {start}\n{}\n", self.rules.join("\n"));
        ToolGrammar { lark, starts_after, unnamed: self.unnamed }
    }
}

/// A regular expression of the text.
pub(crate) fn regex(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            _ if r".^$|?*+()[]{}\/".contains(c) => out.extend(['\\', c]),
            _ => out.push(c),
        }
    }
    out
}
