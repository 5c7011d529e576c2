//! Reads the rules of a GBNF grammar.

use std::collections::HashMap;

use super::node::{Node, Rules, WHAT, invalid};
use crate::ConstraintError;
use crate::limits::Limits;

/// Largest number of repetitions.
const MAX_COUNT: u32 = 100_000;

/// The rules of a grammar.
///
/// # Errors
/// When the text is not in GBNF; the error names the line.
pub(super) fn rules(text: &str, limits: &Limits) -> Result<Rules, ConstraintError> {
    let mut reader = Reader { rest: text, line: 1, depth: 0, limits, numbers: HashMap::new() };
    let mut bodies: Vec<Option<Node>> = Vec::new();
    reader.space();
    while !reader.rest.is_empty() {
        let line = reader.line;
        let name = reader.rule_head()?.ok_or_else(|| invalid(line, "expected a rule, as in `name ::= \"text\"`"))?;
        let body = reader.choice()?;
        let number = reader.number(&name);
        bodies.resize(bodies.len().max(number + 1), None);
        if bodies[number].replace(body).is_some() {
            return Err(invalid(line, &format!("the rule `{name}` is defined twice")));
        }
    }
    bodies.resize(bodies.len().max(reader.numbers.len()), None);
    let undefined = reader.numbers.iter().filter(|(_, number)| bodies[**number].is_none()).map(|(name, _)| name).min();
    if let Some(name) = undefined {
        return Err(ConstraintError::Invalid { what: WHAT, reason: format!("the rule `{name}` is not defined") });
    }
    let no_root = || ConstraintError::Invalid { what: WHAT, reason: "it has no rule `root`".into() };
    let root = *reader.numbers.get("root").ok_or_else(no_root)?;
    Ok(Rules { bodies: bodies.into_iter().flatten().collect(), root })
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    depth: usize,
    limits: &'a Limits,
    numbers: HashMap<String, usize>,
}

impl Reader<'_> {
    fn number(&mut self, name: &str) -> usize {
        let next = self.numbers.len();
        *self.numbers.entry(name.to_owned()).or_insert(next)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let char = self.peek()?;
        self.line += usize::from(char == '\n');
        self.rest = &self.rest[char.len_utf8()..];
        Some(char)
    }

    fn takes(&mut self, expected: &str) -> bool {
        let rest = self.rest.strip_prefix(expected);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Skips white space and comments.
    fn space(&mut self) {
        while let Some(char) = self.peek() {
            match char {
                '#' => {
                    while self.peek().is_some_and(|char| char != '\n') {
                        self.next();
                    }
                }
                char if char.is_whitespace() => drop(self.next()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let end = self.rest.find(|char: char| !char.is_ascii_alphanumeric() && char != '-' && char != '_');
        let (name, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// `name ::=`; `None`, without a change, where there is none.
    fn rule_head(&mut self) -> Result<Option<String>, ConstraintError> {
        let (rest, line) = (self.rest, self.line);
        if let Some(name) = self.name() {
            self.space();
            if self.takes("::=") {
                self.space();
                return Ok(Some(name));
            }
        }
        (self.rest, self.line) = (rest, line);
        Ok(None)
    }

    /// Alternatives, up to the end of the rule or of the group.
    fn choice(&mut self) -> Result<Node, ConstraintError> {
        if self.depth > self.limits.max_nesting {
            let reason = format!("groups nest deeper than {} levels", self.limits.max_nesting);
            return Err(invalid(self.line, &reason));
        }
        self.depth += 1;
        let mut parts = vec![self.sequence()?];
        while self.takes("|") {
            self.space();
            parts.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(if parts.len() == 1 { parts.remove(0) } else { Node::Choice(parts) })
    }

    fn sequence(&mut self) -> Result<Node, ConstraintError> {
        let mut parts = Vec::new();
        while let Some(part) = self.element()? {
            self.space();
            parts.push(self.repeated(part)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Node::Sequence(parts) })
    }

    /// One element; `None` at the end of the sequence.
    fn element(&mut self) -> Result<Option<Node>, ConstraintError> {
        let line = self.line;
        Ok(Some(match self.peek() {
            None | Some('|' | ')') => return Ok(None),
            Some('"') => self.literal()?,
            Some('[') => self.class()?,
            Some('.') => {
                self.next();
                Node::Any
            }
            Some('(') => {
                self.next();
                self.space();
                let inner = self.choice()?;
                if !self.takes(")") {
                    return Err(invalid(line, "a `(` is not closed"));
                }
                inner
            }
            Some('<' | '!') => {
                let feature = "<token>".to_owned();
                return Err(ConstraintError::Unsupported {
                    feature,
                    place: format!("line {line} of the GBNF grammar"),
                });
            }
            Some(char) => {
                let (rest, line) = (self.rest, self.line);
                if self.rule_head()?.is_some() {
                    // The next rule begins.
                    (self.rest, self.line) = (rest, line);
                    return Ok(None);
                }
                let name = self.name().ok_or_else(|| invalid(line, &format!("`{char}` is not expected here")))?;
                Node::Rule(self.number(&name))
            }
        }))
    }

    fn repeated(&mut self, mut part: Node) -> Result<Node, ConstraintError> {
        loop {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.counts()?,
                _ => return Ok(part),
            };
            // The operator, or the brace behind counts.
            self.next();
            self.space();
            part = Node::Repeat { inner: Box::new(part), min, max };
        }
    }

    /// `{m}`, `{m,}`, `{m,n}` or `{,n}`, up to the closing brace.
    fn counts(&mut self) -> Result<(u32, Option<u32>), ConstraintError> {
        let line = self.line;
        let wrong = || invalid(line, "expected `{m}`, `{m,}` or `{m,n}` after an element");
        self.next();
        let end = self.rest.find('}').ok_or_else(wrong)?;
        let (counts, rest) = self.rest.split_at(end);
        self.rest = rest;
        let count = |text: &str| -> Result<Option<u32>, ConstraintError> {
            match text.trim() {
                "" => Ok(None),
                text => match text.parse::<u32>() {
                    Ok(count) if count <= MAX_COUNT => Ok(Some(count)),
                    Ok(count) => Err(invalid(line, &format!("{count} repetitions are over the limit of {MAX_COUNT}"))),
                    Err(_) => Err(wrong()),
                },
            }
        };
        let (min, max) = match counts.split_once(',') {
            None => {
                let exact = count(counts)?.ok_or_else(wrong)?;
                (exact, Some(exact))
            }
            Some((min, max)) => (count(min)?.unwrap_or(0), count(max)?),
        };
        match max.is_some_and(|max| max < min) {
            true => Err(invalid(line, &format!("{{{counts}}} has a largest number below its smallest"))),
            false => Ok((min, max)),
        }
    }

    fn literal(&mut self) -> Result<Node, ConstraintError> {
        let line = self.line;
        self.next();
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => break,
                None | Some('\n') => return Err(invalid(line, "a `\"` is not closed")),
                Some(_) => text.push(self.character()?),
            }
        }
        self.next();
        Ok(if text.is_empty() { Node::Sequence(Vec::new()) } else { Node::Literal(text) })
    }

    fn class(&mut self) -> Result<Node, ConstraintError> {
        let line = self.line;
        self.next();
        let is_negated = self.takes("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                Some(']') => break,
                None | Some('\n') => return Err(invalid(line, "a `[` is not closed")),
                Some(_) => {}
            }
            let first = self.character()?;
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            let last = match is_range {
                true => {
                    self.next();
                    self.character()?
                }
                false => first,
            };
            if last < first {
                return Err(invalid(line, &format!("the range `{first}-{last}` is empty")));
            }
            ranges.push((first, last));
        }
        self.next();
        match (ranges.is_empty(), is_negated) {
            (true, false) => Err(invalid(line, "`[]` matches nothing")),
            (true, true) => Ok(Node::Any),
            _ => Ok(Node::Class { ranges, is_negated }),
        }
    }

    /// One character of a literal or a class, with its escape.
    fn character(&mut self) -> Result<char, ConstraintError> {
        let line = self.line;
        let ends = || invalid(line, "the grammar ends within a character");
        let char = self.next().ok_or_else(ends)?;
        if char != '\\' {
            return Ok(char);
        }
        let digits = match self.next().ok_or_else(ends)? {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            char @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/') => return Ok(char),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Err(invalid(line, &format!("the escape `\\{other}` is not known"))),
        };
        let hex = self.rest.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let char = hex.and_then(char::from_u32).ok_or_else(|| {
            let reason = format!("an escape needs {digits} hexadecimal digits of a character of Unicode");
            invalid(line, &reason)
        })?;
        self.rest = &self.rest[digits..];
        Ok(char)
    }
}
